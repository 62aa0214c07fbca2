"""Payloads never change: every codec against files made once by tests/golden/make.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from thinwire.codecs import list_codecs, parse


def _load() -> ModuleType:
    path = Path(__file__).parents[1] / "golden" / "make.py"
    spec = importlib.util.spec_from_file_location("golden_make", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


golden = _load()
CASES = golden.cases()


@pytest.mark.parametrize(("spec", "dtype"), CASES, ids=[f"{s}-{str(d)[6:]}" for s, d in CASES])
def test_payload_and_values(spec: str, dtype: torch.dtype) -> None:
    # hivemind 545, hivemind 572
    codec = parse(spec)
    # A missing file is a failure: a format that changes needs a new name or version, not a new file.
    with np.load(golden.FOLDER / golden.name(codec, dtype)) as file:
        stored = {key: file[key] for key in file.files}
    assert parse(str(stored["spec"])) == codec
    x = torch.from_numpy(stored["input"]).view(dtype)
    assert golden.encode(codec, x).numpy().tobytes() == stored["payload"].tobytes()
    decoded = torch.empty_like(x)
    codec.decode(torch.from_numpy(stored["payload"]), decoded)
    assert golden.bits(decoded).tobytes() == stored["decoded"].tobytes()
    if "again" in stored:
        state, sent = codec.new_state(), golden.stream(codec, x)
        for payload, key in zip(sent, ("first", "again"), strict=True):
            assert payload.numpy().tobytes() == stored[key].tobytes()
            codec.decode(payload, decoded, state=state)
            assert golden.bits(decoded).tobytes() == stored["input"].tobytes()


def test_every_file_has_a_case_and_every_codec_a_file() -> None:
    names = {golden.name(parse(spec), dtype) for spec, dtype in CASES}
    assert {path.name for path in golden.FOLDER.glob("*.npz")} == names
    ours = {name for name, cls in list_codecs().items() if cls.__module__.startswith("thinwire.")}
    assert {parse(spec).name for spec, _ in CASES} == ours | {"chain", "coded"}


def test_messages_are_those_of_the_files() -> None:
    with np.load(golden.FOLDER / golden.name(parse("none"), torch.float32)) as file:
        assert golden.bits(golden.message(torch.float32)).tobytes() == file["input"].tobytes()
