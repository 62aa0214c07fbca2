"""What the base class checks before a codec sees anything."""

from __future__ import annotations

import pytest
import torch

from thinwire.codecs import Int8Codec, NoneCodec, parse, warm_up
from thinwire.errors import SpecError, UnsupportedError, WireError

X = torch.linspace(-1, 1, 64)


def room(nbytes: int = 256) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_encode_says_what_it_refuses() -> None:
    codec = NoneCodec()
    with pytest.raises(UnsupportedError, match=r"none takes bfloat16, float16, float32, float64, not int64"):
        codec.encode(torch.arange(3), room())
    with pytest.raises(UnsupportedError, match="input is not contiguous"):
        codec.encode(X[::2], room())
    with pytest.raises(ValueError, match="out holds 255 bytes, 256 are needed for 64 values"):
        codec.encode(X, room(255))
    with pytest.raises(UnsupportedError, match="contiguous 1-D uint8"):
        codec.encode(X, room().reshape(16, 16))
    with pytest.raises(UnsupportedError, match="meta"):
        codec.encode(torch.empty(3, device="meta"), room())


def test_decode_says_what_it_refuses() -> None:
    codec = NoneCodec()
    with pytest.raises(WireError, match="exactly 256 bytes, found 255"):
        codec.decode(room(255), torch.empty(64))
    with pytest.raises(WireError, match="exactly 256 bytes, found 257"):
        codec.decode_add(room(257), torch.empty(64), torch.float32)
    values = torch.empty(64)
    with pytest.raises(UnsupportedError, match="out overlaps"):
        codec.decode(values.view(torch.uint8), values)
    with pytest.raises(UnsupportedError, match="contiguous float32 output"):
        codec.decode_add(room(), torch.empty(64, dtype=torch.float16), torch.float32)
    with pytest.raises(UnsupportedError, match=r"int8.*not float64"):
        Int8Codec().decode_add(room(68), torch.empty(64), torch.float64)


def test_encode_residual_says_what_it_refuses() -> None:
    codec = Int8Codec()
    with pytest.raises(UnsupportedError, match="float32 input and residual of one size"):
        codec.encode_residual(X.half(), room(), torch.empty(64))
    with pytest.raises(UnsupportedError, match="float32 input and residual of one size"):
        codec.encode_residual(X, room(), torch.empty(63))
    both, out = torch.zeros(65), torch.zeros(64)
    with pytest.raises(UnsupportedError, match="overlaps"):
        codec.encode_residual(both[:64], room(), both[1:])
    with pytest.raises(UnsupportedError, match="overlaps"):
        codec.encode_residual(X, out.view(torch.uint8), out)
    with pytest.raises(ValueError, match="out holds 67 bytes, 68 are needed"):
        codec.encode_residual(X, room(67), torch.empty(64))


@pytest.mark.parametrize("spec", ["none", "bf16", "int8", "int4"])
def test_tensors_that_need_gradients_are_read_and_written(spec: str) -> None:
    codec = parse(spec)
    x = X.clone().requires_grad_()
    out = room(codec.max_nbytes(64, x.dtype))
    codec.encode(x, out)
    y = torch.zeros(64, requires_grad=True)
    codec.decode(out, y)
    codec.decode_add(out, y, x.dtype)
    bound = codec.error_bound(x)
    assert bound is not None
    assert (y.detach().double() / 2 - x.detach().double()).abs().le(bound + 1e-6).all()
    codec.encode_residual(x, out, torch.zeros(64, requires_grad=True))


def test_codecs_without_a_kernel_for_a_device_say_so() -> None:
    with pytest.raises(UnsupportedError, match="meta"):
        Int8Codec().encode(torch.empty(3, device="meta"), torch.empty(9, device="meta", dtype=torch.uint8))


def test_warm_up_takes_specs_and_codecs() -> None:
    warm_up()
    warm_up(["none", Int8Codec(64)])
    with pytest.raises(SpecError):
        warm_up(["nothing"])


def test_warm_up_in_several_processes() -> None:
    warm_up(["none", "int8", "mpc:dim=1"], processes=2)
    with pytest.raises(SpecError):
        warm_up(["int8", "nothing"], processes=2)
