"""Triton kernels of the block integers; codecs/blockint.py is the format, codecs/cpu/blockint.py has the same bytes."""

# Triton types the kernels; mypy cannot.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .values import (
    INF,
    LARGEST,
    NAN,
    bits_of,
    load_bits,
    load_word,
    narrow,
    opaque,
    round_even,
    store_bits,
    store_word,
    widen,
)

_SIGN = tl.constexpr(-(2**31))
_TINY = tl.constexpr(2.0**-100)
_LIFT = tl.constexpr(2.0**100)
_ROW_VALUES = 1024  # values of a program's tile, in rows of one block
_TILE = 1024
_PLANES = {128: (8, 0), 32: (4, 2), 16: (4, 1), 8: (4, 0), 4: (2, 1), 2: (2, 0)}
"""q -> bits of a code in the first and in the second plane."""


@triton.jit
def _key(seed, block):
    """64-bit key of a block: splitmix64's output of its number."""
    z = seed + (block + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _random24(lane, k0, k1):
    h = lane.to(tl.uint32) + k0
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) + k1
    h = h * 0xD35A2D97
    return ((h ^ (h >> 15)) >> 8).to(tl.int32)


@triton.jit
def _put_plane(
    payload, at, codes, rows, n, SHIFT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write bits SHIFT .. SHIFT + BITS - 1 of the codes of whole rows to the plane that begins at byte ``at``."""
    PER: tl.constexpr = 8 // BITS
    part = (codes >> SHIFT) & ((1 << BITS) - 1)
    if PER > 1:
        spread = tl.reshape(part, [ROWS, WIDTH // PER, PER]) << (BITS * tl.arange(0, PER))[None, None, :]
        packed = tl.sum(spread, axis=2)
    else:
        packed = part
    byte = tl.arange(0, WIDTH // PER)[None, :]
    place = rows * (BLOCK * BITS // 8) + byte
    live = (byte < BLOCK * BITS // 8) & (place < (n * BITS + 7) // 8)
    tl.store(payload + at + place, packed.to(tl.uint8), mask=live)


@triton.jit(do_not_specialize=["zero"])
def _encode(
    x, payload, residual, n, seeds, zero, Q: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, NARROW: tl.constexpr, HALF: tl.constexpr, STOCHASTIC: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """A program codes ROWS blocks; WIDTH is the power of two that holds a block."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, WIDTH)[None, :]
    index = rows * BLOCK + lane
    live = (lane < BLOCK) & (index < n)
    u = load_bits(x, index, live, NARROW, HALF)
    # scale: the larger side of the block, or the smaller one's Q / (Q - 1)
    high = tl.max(tl.maximum(u, 0), axis=1)[:, None]
    low = tl.max(tl.maximum(u ^ _SIGN, 0), axis=1)[:, None]
    big = tl.maximum(high, low)
    small = tl.minimum(high, low).to(tl.float32, bitcast=True)
    finite = big < INF
    most = tl.full([ROWS, 1], Q - 1, tl.float32)
    c = tl.div_rn(small, most) * Q
    c = tl.minimum(c, tl.full([ROWS, 1], LARGEST, tl.int32).to(tl.float32, bitcast=True))
    c = tl.maximum(c, tl.where(finite, big, 0).to(tl.float32, bitcast=True))
    c = tl.where(high > low, -c, c)
    c_bits = tl.where(finite, c.to(tl.int32, bitcast=True), NAN)
    blocks = (n + BLOCK - 1) // BLOCK
    store_word(payload, 4 * rows, c_bits, rows < blocks)
    # codes
    coded = finite & (c != 0)
    lift = tl.where(tl.abs(c) < _TINY, _LIFT, 1.0)
    step = tl.where(coded, c * lift * (1.0 / Q), 1.0)
    value = tl.where(coded, u, 0).to(tl.float32, bitcast=True)
    if STOCHASTIC:
        y = tl.div_rn(value * lift, step + tl.zeros([ROWS, WIDTH], tl.float32))
        key = _key(tl.load(seeds).to(tl.uint64), rows)
        fixed = (tl.minimum(y, Q - 1.0) * 16777216.0).to(tl.int32)
        random = _random24(lane, (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32))
        codes = (fixed + random) >> 24
    else:
        y = (value * lift) * tl.div_rn(tl.full([ROWS, 1], 1.0, tl.float32), step)
        codes = tl.minimum(round_even(y), Q - 1)
    codes = tl.where(coded & live, codes, 0)
    first = 4 * blocks
    _put_plane(payload, first, codes, rows, n, 0, LOW, BLOCK, WIDTH, ROWS)
    if HIGH > 0:
        _put_plane(payload, first + (n * LOW + 7) // 8, codes, rows, n, LOW, HIGH, BLOCK, WIDTH, ROWS)
    if RESIDUAL:
        back = c_bits.to(tl.float32, bitcast=True) * (codes.to(tl.float32) * (1.0 / Q))
        lost = u.to(tl.float32, bitcast=True) - opaque(back, zero)
        tl.store(residual + index, lost, mask=live)


@triton.jit
def _decoded(
    payload, index, n, live, zero, Q: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr
):
    """fp32 bits of values of a payload."""
    blocks = (n + BLOCK - 1) // BLOCK
    c_bits = load_word(payload, 4 * (index // BLOCK), live)
    first = 4 * blocks
    codes = tl.load(payload + first + index * LOW // 8, mask=live, other=0).to(tl.int32)
    codes = (codes >> (index * LOW % 8).to(tl.int32)) & ((1 << LOW) - 1)
    if HIGH > 0:
        second = first + (n * LOW + 7) // 8
        more = tl.load(payload + second + index * HIGH // 8, mask=live, other=0).to(tl.int32)
        codes |= ((more >> (index * HIGH % 8).to(tl.int32)) & ((1 << HIGH) - 1)) << LOW
    codes = (codes ^ Q) - Q
    value = c_bits.to(tl.float32, bitcast=True) * (codes.to(tl.float32) * (1.0 / Q))
    u = opaque(value, zero).to(tl.int32, bitcast=True)
    return tl.where((c_bits & 0x7FFFFFFF) < INF, u, NAN)


@triton.jit(do_not_specialize=["zero"])
def _decode(
    payload, out, n, zero, Q: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, NARROW: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = index < n
    store_bits(out, index, _decoded(payload, index, n, live, zero, Q, LOW, HIGH, BLOCK), live, NARROW, HALF)


@triton.jit(do_not_specialize=["zero"])
def _decode_add(
    payload, out, n, zero, Q: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, NARROW: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = index < n
    u = _decoded(payload, index, n, live, zero, Q, LOW, HIGH, BLOCK)
    if NARROW:
        u = widen(narrow(u, HALF), HALF)
    total = tl.load(out + index, mask=live, other=0.0) + u.to(tl.float32, bitcast=True)
    tl.store(out + index, total, mask=live)


def encode(
    x: torch.Tensor,
    payload: torch.Tensor,
    residual: torch.Tensor | None,
    block: int,
    q: int,
    stochastic: bool,
    seed: int,
) -> None:
    """Encode x (flat) into payload (uint8, exactly sized); residual: fp32, x - decoded, may be x itself."""
    if x.numel() == 0:
        return
    low, high = _PLANES[q]
    width = triton.next_power_of_2(block)
    rows = max(1, _ROW_VALUES // width)
    blocks = -(-x.numel() // block)
    # As a tensor the seed is data; an integer of value 1 would be compiled in.
    seeds = torch.tensor([_signed(seed)], dtype=torch.int64, device=x.device)
    _encode[(triton.cdiv(blocks, rows),)](
        bits_of(x), payload, residual if residual is not None else payload, x.numel(), seeds, 0,
        Q=q, LOW=low, HIGH=high, BLOCK=block, WIDTH=width, ROWS=rows, NARROW=x.dtype != torch.float32,
        HALF=x.dtype == torch.float16, STOCHASTIC=stochastic, RESIDUAL=residual is not None,
    )  # fmt: skip


def decode(payload: torch.Tensor, out: torch.Tensor, block: int, q: int) -> None:
    """Decode payload (exactly sized) to out (flat; fp32, fp16, bf16)."""
    _run(_decode, payload, bits_of(out), out.dtype, block, q)


def decode_add(payload: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, block: int, q: int) -> None:
    """out (flat, fp32) += decoded values, first rounded to ``dtype``."""
    _run(_decode_add, payload, out, dtype, block, q)


def _run(kernel, payload, out, dtype, block, q):
    if out.numel() == 0:
        return
    low, high = _PLANES[q]
    kernel[(triton.cdiv(out.numel(), _TILE),)](
        payload, out, out.numel(), 0, Q=q, LOW=low, HIGH=high, BLOCK=block, TILE=_TILE,
        NARROW=dtype != torch.float32, HALF=dtype == torch.float16,
    )  # fmt: skip


def _signed(seed: int) -> int:
    """A 64-bit seed as the int64 of the same bits."""
    low = seed & 0xFFFFFFFFFFFFFFFF
    return low - (1 << 64) if low >> 63 else low
