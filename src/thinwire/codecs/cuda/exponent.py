"""Triton kernels of ``exponent``. codecs/reference_exponent.py is the specification.

The code is made on the CPU from the counts of the exponents. Encoding knows every value's place from sums of code lengths,
so all values are written at once, or-ed into zeroed words. Decoding gives each block of 1024 values a lane.
"""

# Triton types the kernels; mypy cannot.
# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..cpu import exponent as cpu
from ..cpu import exponent_planes, huffman
from ..reference_exponent import HEADER_NBYTES
from ..reference_huffman import BLOCK, LENGTHS_NBYTES, LIMIT
from .values import bits_of

_SYMBOLS = 256
_LANES = 32  # blocks that a program decodes
_TILE = 1024
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _value(x, index, live, NARROW: tl.constexpr):
    raw = tl.load(x + index, mask=live, other=0)
    if NARROW:
        return raw.to(tl.int32) & 0xFFFF
    else:
        return raw


@triton.jit
def _exponent(v, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr):
    return (v >> MANTISSA) & ((1 << EXPONENTS) - 1)


@triton.jit
def _sizes(x, lengths, sizes, n, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr, NARROW: tl.constexpr):
    """Bytes of each block's stream."""
    block = tl.program_id(0)
    index = block.to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    live = index < n
    symbol = _exponent(_value(x, index, live, NARROW), MANTISSA, EXPONENTS)
    bits = tl.sum(tl.where(live, tl.load(lengths + symbol), 0), axis=0)
    tl.store(sizes + block, (bits + 7) >> 3)


@triton.jit
def _streams(
    x, lengths, codes, starts, words, n, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr, NARROW: tl.constexpr
):
    """Write the codes of a block; starts: the streams' first bytes. words: the payload as int32, zeroed there."""
    block = tl.program_id(0)
    index = block.to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    live = index < n
    symbol = _exponent(_value(x, index, live, NARROW), MANTISSA, EXPONENTS)
    length = tl.where(live, tl.load(lengths + symbol), 0)
    bit = 8 * tl.load(starts + block) + (tl.cumsum(length, axis=0) - length).to(tl.int64)
    code = tl.where(live, tl.load(codes + symbol), 0).to(tl.uint64) << (bit & 31).to(tl.uint64)
    low = (code & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = (code >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(words + (bit >> 5), low, mask=low != 0)
    tl.atomic_or(words + (bit >> 5) + 1, high, mask=high != 0)


@triton.jit
def _rest(
    x, index, live, MANTISSA: tl.constexpr, DROP: tl.constexpr, TOTAL: tl.constexpr, NARROW: tl.constexpr
):
    """Sign above the kept mantissa bits."""
    v = _value(x, index, live, NARROW)
    kept = (v >> DROP) & ((1 << (MANTISSA - DROP)) - 1)
    return kept | (((v >> (TOTAL - 1)) & 1) << (MANTISSA - DROP))


@triton.jit
def _put_planes(
    x, planes, n, MANTISSA: tl.constexpr, DROP: tl.constexpr, TOTAL: tl.constexpr, NARROW: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the rests of n values to their planes."""
    WIDTH: tl.constexpr = MANTISSA - DROP + 1
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    rest = _rest(x, index, index < n, MANTISSA, DROP, TOTAL, NARROW)
    for p in tl.static_range(WIDTH // 8):
        tl.store(planes + p * n + index, ((rest >> (8 * p)) & 255).to(tl.uint8), mask=index < n)
    if WIDTH % 8 != 0:
        # Three bits a value: eight values make three bytes.
        group = tl.program_id(0).to(tl.int64) * (TILE // 8) + tl.arange(0, TILE // 8)
        three = tl.zeros([TILE // 8], tl.int32)
        for i in tl.static_range(8):
            at = 8 * group + i
            three |= (_rest(x, at, at < n, MANTISSA, DROP, TOTAL, NARROW) >> 8) << (3 * i)
        for i in tl.static_range(3):
            place = 3 * group + i
            tl.store(
                planes + n + place, ((three >> (8 * i)) & 255).to(tl.uint8), mask=place < (3 * n + 7) // 8
            )


@triton.jit
def _symbols(payload, starts, table, symbols, n, end, blocks, LANES: tl.constexpr, LONGEST: tl.constexpr):
    """The exponents of LANES blocks, one after the other in each; LONGEST: at least the values of the longest one.

    table: symbol | bits << 8 by the next 12 bits.
    """
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    here = block < blocks
    bit = 8 * tl.load(starts + block, mask=here, other=0)
    for i in range(LONGEST):
        byte = bit >> 3
        window = tl.load(payload + byte, mask=here & (byte < end), other=0).to(tl.int32)
        window |= tl.load(payload + byte + 1, mask=here & (byte + 1 < end), other=0).to(tl.int32) << 8
        window |= tl.load(payload + byte + 2, mask=here & (byte + 2 < end), other=0).to(tl.int32) << 16
        entry = tl.load(table + ((window >> (bit & 7).to(tl.int32)) & 4095))
        index = block * _BLOCK + i
        tl.store(symbols + index, (entry & 255).to(tl.uint8), mask=here & (index < n))
        bit += entry >> 8


@triton.jit
def _join(
    planes, symbols, out, n, MANTISSA: tl.constexpr, DROP: tl.constexpr, TOTAL: tl.constexpr, NARROW: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Exponents and rests to values."""
    WIDTH: tl.constexpr = MANTISSA - DROP + 1
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = index < n
    rest = tl.zeros([TILE], tl.int32)
    for p in tl.static_range(WIDTH // 8):
        rest |= tl.load(planes + p * n + index, mask=live, other=0).to(tl.int32) << (8 * p)
    if WIDTH % 8 != 0:
        bit = 3 * index
        byte, last = n + (bit >> 3), n + (3 * n + 7) // 8
        pair = tl.load(planes + byte, mask=live, other=0).to(tl.int32)
        pair |= tl.load(planes + byte + 1, mask=live & (byte + 1 < last), other=0).to(tl.int32) << 8
        rest |= ((pair >> (bit & 7).to(tl.int32)) & 7) << 8
    kept = rest & ((1 << (MANTISSA - DROP)) - 1)
    sign = (rest >> (MANTISSA - DROP)) & 1
    exponent = tl.load(symbols + index, mask=live, other=0).to(tl.int32)
    v = (sign << (TOTAL - 1)) | (exponent << MANTISSA) | (kept << DROP)
    if NARROW:
        tl.store(out + index, v.to(tl.int16), mask=live)
    else:
        tl.store(out + index, v, mask=live)


def encode(x: torch.Tensor, out: torch.Tensor, mantissa_bits: int, spare: bool, lengths: Any) -> int:
    """Encode x (flat) into out (uint8, the largest size); returns the bytes written. Waits for the device.

    spare, lengths: as for the kernel of the CPU.
    """
    n, bits = x.numel(), bits_of(x)
    raw = HEADER_NBYTES + x.nbytes
    out[:HEADER_NBYTES] = 0
    if n:
        shape = _shape(x.dtype, mantissa_bits)
        mask = (1 << shape["EXPONENTS"]) - 1
        symbols = ((bits >> mantissa_bits) & mask).long()
        counts = torch.bincount(symbols, minlength=_SYMBOLS).cpu().numpy()
        wide = counts.copy()
        if spare:
            cpu.widen(wide, mask + 1)
        huffman.code_lengths(wide, lengths)
        drop = _drop(bits, mantissa_bits)
        blocks, planes = -(-n // BLOCK), exponent_planes.plane_nbytes(n, mantissa_bits - drop + 1)
        most = LENGTHS_NBYTES + 2 * blocks + planes + int((counts * lengths).sum()) // 8 + blocks
        if most < x.nbytes:
            head = np.zeros(HEADER_NBYTES + LENGTHS_NBYTES, np.uint8)
            head[:2] = 1, drop
            huffman.put_lengths(lengths, head, HEADER_NBYTES)
            return _encode_coded(bits, out, head, lengths, drop, shape)
    out[HEADER_NBYTES:raw] = x.view(torch.uint8) if n else out[HEADER_NBYTES:raw]
    return raw


def encode_again(
    x: torch.Tensor, out: torch.Tensor, mantissa_bits: int, drop: int, lengths: Any, book: int
) -> int:
    """Encode x with the codebook of an earlier message; -1 if it does not fit x. Waits for the device."""
    if not x.numel():
        return -1
    bits, shape = bits_of(x), _shape(x.dtype, mantissa_bits)
    symbols = ((bits >> mantissa_bits) & ((1 << shape["EXPONENTS"]) - 1)).long()
    coded = torch.from_numpy(lengths).to(x.device)[symbols] > 0
    if not bool(coded.all()) or bool((bits & ((1 << drop) - 1)).any()):
        return -1
    head = np.array([2, drop, book & 255, book >> 8], np.uint8)
    return _encode_coded(bits, out[: HEADER_NBYTES + x.nbytes], head, lengths, drop, shape)


def _encode_coded(bits, out, head, lengths, drop, shape):
    """Write head, sizes, planes and streams; returns the end, -1 if out is too short."""
    n, blocks, device = bits.numel(), -(-bits.numel() // BLOCK), bits.device
    first = len(head) + 2 * blocks
    streams_at = first + exponent_planes.plane_nbytes(n, shape["MANTISSA"] - drop + 1)
    codes = np.zeros(_SYMBOLS, np.uint32)
    huffman.canonical(lengths, codes)
    exponents = {key: shape[key] for key in ("MANTISSA", "EXPONENTS", "NARROW")}
    rests = {key: shape[key] for key in ("MANTISSA", "TOTAL", "NARROW")}
    on_device = torch.from_numpy(lengths.astype(np.int32)).to(device)
    sizes = torch.empty(blocks, dtype=torch.int32, device=device)
    _sizes[(blocks,)](bits, on_device, sizes, n, **exponents)
    ends = sizes.long().cumsum(0)
    nbytes = streams_at + int(ends[-1])
    if nbytes > out.numel():
        return -1
    # Codes are or-ed into aligned words, which may reach beyond the payload: they get memory of their own.
    room = torch.zeros(nbytes // 4 * 4 + 8, dtype=torch.uint8, device=device)
    room[: len(head)] = torch.from_numpy(head).to(device)
    room[len(head) : first] = torch.stack([sizes & 255, sizes >> 8], 1).to(torch.uint8).view(-1)
    _put_planes[(triton.cdiv(n, _TILE),)](bits, room[first:], n, DROP=drop, TILE=_TILE, **rests)
    plain = torch.from_numpy((codes & 0xFFFFFF).astype(np.int32)).to(device)
    starts = streams_at + ends - sizes
    _streams[(blocks,)](bits, on_device, plain, starts, room.view(torch.int32), n, **exponents)
    out[:nbytes] = room[:nbytes]
    return nbytes


def decode(payload: torch.Tensor, head: Any, out: torch.Tensor, mantissa_bits: int, lengths: Any) -> None:
    """Decode a checked payload to out (flat). head: its bytes up to the planes, as a numpy array.

    lengths: as for the kernel of the CPU.
    """
    n = out.numel()
    if head[0] == 0:
        if n:
            out.view(torch.uint8).copy_(payload[HEADER_NBYTES:])
        return
    drop, device = int(head[1]), out.device
    sizes_at = HEADER_NBYTES
    if head[0] == 1:
        huffman.get_lengths(head, HEADER_NBYTES, lengths)
        sizes_at += LENGTHS_NBYTES
    single = np.empty(1 << LIMIT, np.int32)
    huffman.lookup_single(lengths, single)
    table = torch.from_numpy(single).to(device)
    blocks = -(-n // BLOCK)
    first = sizes_at + 2 * blocks
    sizes = np.frombuffer(head[sizes_at:first].tobytes(), "<u2").astype(np.int64)
    streams_at = first + exponent_planes.plane_nbytes(n, mantissa_bits - drop + 1)
    starts = torch.from_numpy(streams_at + sizes.cumsum() - sizes).to(device)
    symbols = torch.empty(n, dtype=torch.uint8, device=device)
    longest = triton.next_power_of_2(min(n, BLOCK))
    grid = (triton.cdiv(blocks, _LANES),)
    _symbols[grid](payload, starts, table, symbols, n, payload.numel(), blocks, LANES=_LANES, LONGEST=longest)
    shape = _shape(out.dtype, mantissa_bits)
    rests = {key: shape[key] for key in ("MANTISSA", "TOTAL", "NARROW")}
    _join[(triton.cdiv(n, _TILE),)](payload[first:], symbols, bits_of(out), n, DROP=drop, TILE=_TILE, **rests)


def _drop(bits: torch.Tensor, mantissa_bits: int) -> int:
    """Low mantissa bits that are zero in all values of an fp32 message: 16, 13 or 0."""
    if mantissa_bits == 23:
        for drop in (16, 13):
            if not bool((bits & ((1 << drop) - 1)).any()):
                return drop
    return 0


def _shape(dtype: torch.dtype, mantissa_bits: int) -> dict[str, Any]:
    total = 8 * dtype.itemsize
    return {
        "MANTISSA": mantissa_bits,
        "EXPONENTS": total - 1 - mantissa_bits,
        "TOTAL": total,
        "NARROW": dtype != torch.float32,
    }
