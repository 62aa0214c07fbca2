"""Specs to codecs: ``parse("int4:block=128")``.

A spec is ``NAME`` or ``NAME:key=value,key=value``; ``NAME:value`` gives the first parameter. Parameters are the fields
of the codec's dataclass. Stages of a chain are separated by ``|``: transforms, one codec, a byte coder
(``hadamard|int4|huffman``). ``str(codec)`` is the full spec and parses back to an equal codec. :func:`parse` gives codecs;
:func:`parse_compressor` whatever a policy can name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, get_type_hints

from ..errors import SpecError, nearest
from .base import Codec, Compressor
from .chain import TRANSFORMS, ChainCodec, Transform
from .coded import BYTE_CODERS, ByteCoder, CodedCodec
from .lowrank import LowRank
from .registry import list_codecs

_T = TypeVar("_T")
_BOOLEANS = {"true": True, "false": False}
_OTHERS: dict[str, type[Compressor]] = {LowRank.name: LowRank}


class Stages(NamedTuple):
    """The stages of a chain."""

    transforms: tuple[Transform, ...]
    codec: Codec
    coder: ByteCoder | None


def parse(spec: str | Compressor) -> Codec:
    """The codec of a spec. Raises SpecError with the position of what is wrong and the nearest names."""
    compressor = parse_compressor(spec)
    if isinstance(compressor, Codec):
        return compressor
    raise SpecError(
        f"{compressor} is no codec: it reduces the matrices of gradients in two rounds. Name it in a policy ([axis.dp], "
        "reduce, feedback = true) and reduce with thinwire.GradientSync or thinwire.compress_ddp"
    )


def parse_compressor(spec: str | Compressor) -> Compressor:
    """The compressor of a spec: a codec, or ``lowrank``. Raises SpecError as :func:`parse` does."""
    if isinstance(spec, Compressor):
        return spec
    if "|" not in spec and not _is(spec, BYTE_CODERS):
        return _one(spec, 0, spec, {**list_codecs(), **_OTHERS}, "codec")
    return ChainCodec(spec) if parse_stages(spec).coder is None else CodedCodec(spec)


def parse_stages(spec: str) -> Stages:
    """The stages of a chain: transforms, one codec, and a byte coder or none."""
    transforms: list[Transform] = []
    codec: Codec | None = None
    coder: ByteCoder | None = None
    position, codecs, texts = 0, list_codecs(), spec.split("|")
    for i, text in enumerate(texts):
        where = f"codec {spec!r}, position {position}"
        if coder is not None:
            raise SpecError(f"{where}: {text!r} comes after {coder}, which is the last of a chain")
        if codec is not None:
            coder = _one(text, position, spec, BYTE_CODERS, "byte coder (after a codec)")
        elif _is(text, BYTE_CODERS):
            raise SpecError(f"{where}: {text} codes the bytes of a codec; put one before it: 'int4|{text}'")
        elif i == len(texts) - 1 or _is(text, codecs):
            codec = _one(text, position, spec, codecs, "codec")
        else:
            transforms.append(_one(text, position, spec, TRANSFORMS, "transform (before a codec)"))
        position += len(text) + 1
    assert codec is not None  # the last stage is one, or comes after one
    return Stages(tuple(transforms), codec, coder)


def _is(text: str, known: Mapping[str, Any]) -> bool:
    return text.partition(":")[0] in known


def _one(text: str, position: int, spec: str, known: Mapping[str, type[_T]], kind: str) -> _T:
    """The stage ``text``, which begins at ``position`` of the spec: a dataclass with its parameters."""
    name, colon, rest = text.partition(":")
    if name not in known:
        raise SpecError(
            f"codec {spec!r}, position {position}: unknown {kind} {name!r}; {nearest(name, known)}"
        )
    cls: Any = known[name]
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    first = position = position + len(name) + len(colon)
    for item in rest.split(",") if colon else []:
        key, equals, value = item.partition("=")
        if not equals and position == first and fields:
            key, value = next(iter(fields)), item
        where = f"codec {spec!r}, position {position}"
        if key not in fields:
            hint = nearest(key, fields) if fields else f"{name} takes no parameters"
            raise SpecError(f"{where}: {name} has no parameter {key!r}; {hint}")
        if key in values:
            raise SpecError(f"{where}: {key!r} is given twice")
        try:
            values[key] = _BOOLEANS[value.lower()] if hints[key] is bool else hints[key](value)
        except (KeyError, ValueError):
            raise SpecError(f"{where}: {key} needs {hints[key].__name__}, found {value!r}") from None
        position += len(item) + 1
    try:
        return cls(**values)  # type: ignore[no-any-return]
    except TypeError:
        missing = [k for k, f in fields.items() if k not in values and f.default is dataclasses.MISSING]
        raise SpecError(f"codec {spec!r}: {name} needs {', '.join(missing)}") from None
    except SpecError as e:
        raise SpecError(f"codec {spec!r}: {e}") from None
