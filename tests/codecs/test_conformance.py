"""Every codec keeps the promises; and the check finds a codec that breaks one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codecs import Bf16Codec, Codec, NoneCodec, list_codecs, parse, registry
from thinwire.codecs.state import CodecState
from thinwire.testing import check_codec, codec_inputs, decode, encode, same_bits

SPECS = (
    "none", "bf16", "fp16", "int8", "int8:block=32", "int8:round=stochastic", "int4", "int4:block=4096",
    "int4:block=32,round=stochastic",
    "int6", "int5:block=32,round=stochastic", "int3", "int2:block=96", "zfp:rate=3",
    "zfp:rate=8", "zfp:rate=32", "zfp:rate=64", "mpc:dim=1", "mpc:dim=32", "exponent", "exponent:reuse=0",
    "fp8", "fp8:e5m2,block=32", "e3m0", "mxfp8", "mxfp8:e5m2", "mxfp4", "nvfp4", "sign", "sign:block=96", "topk",
    "topk:k=7,bits=2", "bounded:abs=0.01", "bounded:rel=0.001",
    "hadamard|int4", "hadamard:block=32|int8:block=96",
    "int8|huffman", "int6:round=stochastic|huffman", "hadamard|int4|huffman", "nvfp4|huffman", "topk|huffman",
    "fp16|huffman",
)  # fmt: skip


def test_every_codec_is_checked() -> None:
    ours = {name for name, cls in list_codecs().items() if cls.__module__.startswith("thinwire.")}
    assert {parse(spec).name for spec in SPECS} == ours | {"chain", "coded"}


@pytest.mark.parametrize("spec", SPECS)
def test_codec_keeps_its_promises(spec: str) -> None:
    # DeepSpeed 4852, NCCL 2199
    check_codec(parse(spec))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_bounds_hold_for_any_finite_input(data: st.DataObject) -> None:
    codec = parse(data.draw(st.sampled_from(SPECS)))
    x = data.draw(codec_inputs(codec, 200))
    y = decode(codec, encode(codec, x), x)
    assert torch.isfinite(y).all()
    bound = codec.error_bound(x)
    assert bound is not None
    assert ((y.double() - x.double()).abs() <= bound).all()
    if codec.lossless:
        assert same_bits(x, y)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_bits_are_coded_the_same_way_twice(data: st.DataObject) -> None:
    codec = parse(data.draw(st.sampled_from(SPECS)))
    x = data.draw(codec_inputs(codec, 200, finite=False))
    payload = encode(codec, x, seed=3)
    assert torch.equal(payload, encode(codec, x.clone(), seed=3))
    y = decode(codec, payload, x)
    assert torch.isfinite(x).all() or not torch.isfinite(y).all()
    assert not codec.lossless or same_bits(x, y)


# --- codecs that break one promise each ----------------------------------------------------------------------


@dataclass(frozen=True)
class Broken(Bf16Codec):
    name: ClassVar[str] = "broken"


class _Bound(Broken):
    def error_bound(self, x: Tensor) -> Tensor:
        return super().error_bound(x) * 0.99


class _Lossless(Broken):
    lossless: ClassVar[bool] = True


class _Size(Broken):
    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        return max(0, super()._encode(x, out, seed) - 1)


class _Parts(Broken):
    def payload_parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        return numel, 1


class _Input(Broken):
    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        size = super()._encode(x, out, seed)
        x.zero_()
        return size


class _Buffer(Broken):
    """Leaves the last byte as it was."""

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        last = out[-1:].clone()
        size = super()._encode(x, out, seed)
        out[-1:] = last
        return size


class _Overflow(Broken):
    def _decode(self, payload: Tensor, out: Tensor) -> None:
        super()._decode(payload, out)
        out.nan_to_num_(0)


class _Add(Broken):
    def _decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        super()._decode_add(payload, out, dtype)
        out += 1


class _Residual(Broken):
    def _encode_residual(self, x: Tensor, out: Tensor, residual: Tensor, seed: int) -> int:
        size = self._encode(x, out, seed)
        residual.zero_()
        return size


class _Threads(Broken):
    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        size = super()._encode(x, out, seed)
        if x.numel() > 10_000:
            out[0] = torch.get_num_threads()
        return size


class _Late(Broken):
    """Writes before it refuses."""

    def encode(self, x: Tensor, out: Tensor, *, seed: int = 0, state: CodecState | None = None) -> int:
        if out.dtype == torch.uint8:
            out[:1] = 99
        return super().encode(x, out, seed=seed, state=state)


class _Spread(Broken):
    def _decode(self, payload: Tensor, out: Tensor) -> None:
        super()._decode(payload, out)
        if not torch.isfinite(out).all():
            out.fill_(torch.nan)


class _Lax(Broken):
    def _check_payload(self, payload: Tensor, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        pass

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        out.zero_()
        n = min(payload.numel() // 2, out.numel())
        super()._decode(payload[: 2 * n], out[:n])

    def _decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        values = torch.empty(out.shape, dtype=dtype)
        self._decode(payload, values)
        out += values


BROKEN = {
    _Bound: "above its bound",
    _Lossless: "bits changed",
    _Size: "fixed size",
    _Parts: "payload_parts",
    _Input: "changed its input",
    _Buffer: "what the buffer held",
    _Overflow: "overflow would be lost",
    _Spread: "spread beyond its granule",
    _Add: "decode_add differs",
    _Residual: "residual is not",
    _Threads: "number of threads",
    _Late: "before it raised",
    _Lax: "was accepted",
}


@pytest.mark.parametrize(("cls", "message"), BROKEN.items(), ids=[c.__name__ for c in BROKEN])
def test_a_broken_promise_is_found(cls: type[Codec], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._CODECS, "broken", cls)
    with pytest.raises(AssertionError, match=message):
        check_codec(cls())


def test_a_spec_that_does_not_parse_back_is_found() -> None:
    class Anonymous(NoneCodec):
        name: ClassVar[str] = "bf16"

    with pytest.raises(AssertionError, match="parse back"):
        check_codec(Anonymous())


def test_same_bits_sees_signs_and_payloads() -> None:
    assert same_bits(torch.tensor([torch.nan, 0.0]), torch.tensor([torch.nan, 0.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([0.0], dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(2, 1))
