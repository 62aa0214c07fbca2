"""Damaged frames of every codec; and the fuzzer finds decoders that trust them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

from thinwire.codecs import Bf16Codec, Codec, list_codecs, parse
from thinwire.testing import fuzz_codec

CASES = 300
SPECS = {"zfp": "zfp:rate=8", "bounded": "bounded:abs=0.1"}
"""Where a codec needs parameters."""
CHAINS = ("hadamard|int4", "int8|huffman", "hadamard|int4|huffman", "topk|huffman")


OURS = [n for n, c in list_codecs().items() if c.__module__.startswith("thinwire.")]


@pytest.mark.parametrize("name", [*OURS, *CHAINS])
def test_damaged_frames_are_refused_or_decoded(name: str) -> None:
    found = fuzz_codec(parse(SPECS.get(name, name)), CASES)
    assert found.total() == CASES
    assert (
        min(found["accepted"], found["refused"]) > CASES / 10
    )  # both happen, or the damage is not what it should be


class _Trusting(Bf16Codec):
    def _decode(self, payload: Tensor, out: Tensor) -> None:
        if payload[:1].sum() == 255:
            raise IndexError("out of range")
        super()._decode(payload, out)


class _Writing(Bf16Codec):
    """Writes one value too many."""

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        super()._decode(payload, out)
        out.as_strided((out.numel() + 1,), (1,))[-1] = 1


class _Changing(Bf16Codec):
    def _decode(self, payload: Tensor, out: Tensor) -> None:
        super()._decode(payload, out)
        payload.zero_()


@pytest.mark.parametrize(
    ("cls", "message"),
    [(_Trusting, "IndexError: out of range"), (_Writing, "wrote outside"), (_Changing, "changed the frame")],
)
def test_a_trusting_decoder_is_found(cls: type[Codec], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        fuzz_codec(cls(), 2000)


@pytest.mark.slow
def test_kernels_stay_in_bounds(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).parents[2] / "bench" / "fuzz.py"
    command = [sys.executable, str(script), "--cases", "20000"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "bounds checking of kernels: on" in run.stdout
