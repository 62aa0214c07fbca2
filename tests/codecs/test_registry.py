"""Specs: what parses, and what the errors say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs import Int4Codec, Int8Codec, NoneCodec, list_codecs, parse, register, registry
from thinwire.errors import SpecError


@pytest.mark.parametrize(
    ("spec", "codec"),
    [
        ("none", NoneCodec()),
        ("int8", Int8Codec()),
        ("int4:64", Int4Codec(64)),
        ("int4:block=64", Int4Codec(64)),
        ("int4:64,round=stochastic", Int4Codec(64, "stochastic")),
        ("int4:round=stochastic", Int4Codec(round="stochastic")),
        ("int8:round=stochastic,block=32", Int8Codec(32, "stochastic")),
    ],
)
def test_parses(spec: str, codec: object) -> None:
    assert parse(spec) == codec
    assert parse(str(codec)) == codec


def test_a_codec_parses_to_itself() -> None:
    codec = Int4Codec(64)
    assert parse(codec) is codec


def test_parameters_tell_codecs_apart() -> None:
    assert parse("int4") != parse("int4:64")
    assert parse("int4") != parse("int8")
    assert len({parse("int4"), parse("int4:128"), parse("int4:round=nearest")}) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int7", "position 0.*unknown codec 'int7'.*'int8'"),
        ("", "position 0: unknown codec ''"),
        ("int4:blok=64", "position 5.*no parameter 'blok'.*'block'"),
        ("int4:block=64,rund=nearest", "position 14.*no parameter 'rund'.*'round'"),
        ("int4:block=64,block=32", "position 14.*given twice"),
        ("int4:block=many", "position 5.*block needs int, found 'many'"),
        ("int4:", "position 5"),
        ("int4:64,32", "position 8.*no parameter '32'"),
        ("none:1", "position 5.*takes no parameters"),
        ("int4:block=33", "multiple of 32.*found 33"),
        ("int4:block=0", "multiple of 32.*found 0"),
        ("int4:block=131072", "multiple of 32 from 32 to 65536.*found 131072"),
        ("int8:round=up", "'nearest' or 'stochastic'.*'up'"),
        ("zfp", "zfp needs rate"),
    ],
)
def test_says_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse(spec)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30) | st.from_regex(r"(int4|none|zfp):[a-z0-9=,]*", fullmatch=True))
def test_any_text_parses_or_gives_a_spec_error(text: str) -> None:
    try:
        codec = parse(text)
    except SpecError:
        return
    assert parse(str(codec)) == codec


def test_a_name_can_be_taken_once() -> None:
    class Other(NoneCodec):
        name: ClassVar[str] = "none"

    with pytest.raises(SpecError, match="taken by thinwire"):
        register(Other)
    assert list_codecs()["none"] is NoneCodec


def test_registered_codecs_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_CODECS", dict(registry._CODECS))

    @register
    @dataclass(frozen=True)
    class Flagged(NoneCodec):
        flag: bool = False
        share: float = 0.5
        name: ClassVar[str] = "flagged"

    assert parse("flagged:true,share=0.25") == Flagged(True, 0.25)
    assert parse(str(Flagged(False, 0.1))) == Flagged(False, 0.1)
    with pytest.raises(SpecError, match="flag needs bool, found 'maybe'"):
        parse("flagged:maybe")
