"""What the Triton kernels of several codecs share: values of any dtype as fp32 bits and back, exact rounding, bytes.

16-bit values are int16 bits; HALF tells fp16 from bf16. All bit patterns are int32.
"""

# Triton types the kernels; mypy cannot.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Triton reads globals only if they are constexpr.
INF = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
LARGEST = tl.constexpr(0x7F7FFFFF)


@triton.jit
def opaque(value, zero):
    """The same fp32 value, through an integer that only the caller knows to be 0: no multiply-add is fused across it."""
    return (value.to(tl.int32, bitcast=True) + zero).to(tl.float32, bitcast=True)


@triton.jit
def round_even(y):
    """The nearest integer (int32) to fp32 values below 2**22 in magnitude, ties to even."""
    u = y.to(tl.int32, bitcast=True)
    exponent = (u >> 23) & 255
    whole = (u & 0x7FFFFF) | 0x800000
    shift = tl.minimum(tl.maximum(150 - exponent, 1), 25)
    r = whole >> shift
    rest = whole & ((1 << shift) - 1)
    middle = 1 << (shift - 1)
    r += ((rest > middle) | ((rest == middle) & ((r & 1) == 1))).to(tl.int32)
    return tl.where(u < 0, -r, r)


@triton.jit
def widen(h, HALF: tl.constexpr):
    """fp16 or bf16 bits (in int32) to fp32 bits, exactly."""
    if HALF:
        a = (h & 0x7FFF) << 13
        shifted = (a + 0x38800000).to(tl.float32, bitcast=True) - 6.103515625e-05  # 2**-14
        r = tl.where(a >= 0x0F800000, a + 0x70000000, a + 0x38000000)
        r = tl.where(a < 0x00800000, shifted.to(tl.int32, bitcast=True), r)
        return r | ((h & 0x8000) << 16)
    else:
        return h << 16


@triton.jit
def narrow(u, HALF: tl.constexpr):
    """fp32 bits to fp16 or bf16 bits (in int32): nearest even; finite values stay finite, Inf stays, NaN is quiet."""
    a = u & 0x7FFFFFFF
    if HALF:
        r = (a - (0x38000000 - 0xFFF) + ((a >> 13) & 1)) >> 13
        r = tl.minimum(r, 0x7BFF)
        s = a.to(tl.float32, bitcast=True) + 0.5
        r = tl.where(a < 0x38800000, s.to(tl.int32, bitcast=True) - 0x3F000000, r)
        r = tl.where(a == INF, 0x7C00, tl.where(a > INF, 0x7E00, r))
    else:
        r = (a + 0x7FFF + ((a >> 16) & 1)) >> 16
        r = tl.minimum(r, 0x7F7F)
        r = tl.where(a == INF, 0x7F80, tl.where(a > INF, 0x7FC0, r))
    return r | ((u >> 16) & 0x8000)


@triton.jit
def load_bits(x, index, live, NARROW: tl.constexpr, HALF: tl.constexpr):
    """fp32 bits of values; 0 where not ``live``. x: int32, or int16 if NARROW."""
    raw = tl.load(x + index, mask=live, other=0)
    if NARROW:
        return widen(raw.to(tl.int32) & 0xFFFF, HALF)
    else:
        return raw


@triton.jit
def store_bits(out, index, u, live, NARROW: tl.constexpr, HALF: tl.constexpr):
    """Write fp32 bits as values of out: int32, or int16 if NARROW."""
    if NARROW:
        tl.store(out + index, narrow(u, HALF).to(tl.int16), mask=live)
    else:
        tl.store(out + index, u, mask=live)


@triton.jit
def load_word(payload, at, live):
    """Four bytes from any address as int32, the lowest first."""
    word = tl.load(payload + at, mask=live, other=0).to(tl.int32)
    word |= tl.load(payload + at + 1, mask=live, other=0).to(tl.int32) << 8
    word |= tl.load(payload + at + 2, mask=live, other=0).to(tl.int32) << 16
    return word | (tl.load(payload + at + 3, mask=live, other=0).to(tl.int32) << 24)


@triton.jit
def store_word(payload, at, word, live):
    """The inverse."""
    tl.store(payload + at, (word & 255).to(tl.uint8), mask=live)
    tl.store(payload + at + 1, ((word >> 8) & 255).to(tl.uint8), mask=live)
    tl.store(payload + at + 2, ((word >> 16) & 255).to(tl.uint8), mask=live)
    tl.store(payload + at + 3, ((word >> 24) & 255).to(tl.uint8), mask=live)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """The values' bits as integers of their width, sharing memory."""
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def is_aligned(x: torch.Tensor) -> bool:
    """Whether x begins at a multiple of 4 bytes, so that it can be seen as int32."""
    return x.data_ptr() % 4 == 0 and x.storage_offset() * x.itemsize % 4 == 0


def words_of(payload: torch.Tensor) -> torch.Tensor:
    """Bytes as int32, sharing memory; a copy if they are not aligned."""
    return (payload if is_aligned(payload) else payload.clone()).view(torch.int32)
