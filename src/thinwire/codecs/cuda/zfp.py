"""Triton kernels of ``zfp``: one lane for each block of 4 values. codecs/reference_zfp.py is the specification.

All arithmetic is on integers. A block's bits are gathered in two 64-bit words; where blocks do not fill whole 32-bit words,
neighbours meet in one and are or-ed into zeroed memory, in whatever order.
"""

# Triton types the kernels; mypy cannot.
# mypy: ignore-errors

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

from ..cpu.zfp_planes import LAST
from ..reference_zfp import plane_code
from .values import INF, NAN, bits_of, load_bits, narrow, store_bits, widen, words_of

_NEGABINARY = tl.constexpr(-1431655766)  # 0xAAAAAAAA
_TILE = 128  # blocks of a program


@cache
def _encode_table(device: torch.device) -> torch.Tensor:
    """[n * 16 + plane] -> code | length << 8 | new n << 16, for n significant slots."""
    table = np.zeros(5 * 16, np.int32)
    for n in range(5):
        for plane in range(16):
            code, after = plane_code(n, plane)
            table[n * 16 + plane] = sum(bit << i for i, bit in enumerate(code)) | len(code) << 8 | after << 16
    return torch.from_numpy(table).to(device)


@cache
def _decode_table(device: torch.device) -> torch.Tensor:
    """[(left * 4 + n) * 128 + next 7 bits] -> plane | bits taken << 8 | new n << 16; left: up to 7 bits."""
    return torch.from_numpy(LAST.astype(np.int32)).to(device)


@triton.jit
def _scaled(u, largest):
    """trunc(x * 2**(30 - emax)) of fp32 bits, for a block whose largest magnitude has the bits ``largest``."""
    a = u & 0x7FFFFFFF
    exponent = a >> 23
    whole = (a & 0x7FFFFF) | tl.where(exponent > 0, 0x800000, 0)
    shift = tl.maximum(exponent, 1) - (largest >> 23) + 6
    i = tl.where(shift >= 0, whole << tl.maximum(shift, 0), whole >> tl.minimum(tl.maximum(-shift, 0), 31))
    return tl.where(u < 0, -i, i)


@triton.jit
def _lift(x, y, z, w):
    x = (x + w) >> 1
    w = w - x
    z = (z + y) >> 1
    y = y - z
    x = (x + z) >> 1
    z = z - x
    w = (w + y) >> 1
    y = y - w
    w = w + (y >> 1)
    y = y - (w >> 1)
    return x, y, z, w


@triton.jit
def _unlift(x, y, z, w):
    y = y + (w >> 1)
    w = w - (y >> 1)
    y = y + w
    w = (w << 1) - y
    z = z + x
    x = (x << 1) - z
    y = y + z
    z = (z << 1) - y
    w = w + x
    x = (x << 1) - w
    return x, y, z, w


@triton.jit
def _class(u):
    """0 finite, 1 +Inf, 2 -Inf, 3 NaN."""
    a = u & 0x7FFFFFFF
    return tl.where(a < INF, 0, tl.where(a > INF, 3, tl.where(u < 0, 2, 1)))


@triton.jit
def _keep(low, high, BUDGET: tl.constexpr):
    """The first BUDGET of 128 bits."""
    if BUDGET < 64:
        low = low & ((1 << BUDGET) - 1)
    if BUDGET <= 64:
        high = high & 0
    elif BUDGET < 128:
        high = high & ((1 << (BUDGET - 64)) - 1)
    return low, high


@triton.jit
def _encode(
    x, words, table, n, BUDGET: tl.constexpr, TILE: tl.constexpr, NARROW: tl.constexpr, HALF: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    first = 4 * block
    live = first < n
    # A partial block repeats slot 0 into 1, 1 into 2, 0 into 3.
    u0 = load_bits(x, first, live, NARROW, HALF)
    u1 = tl.where(first + 1 < n, load_bits(x, first + 1, first + 1 < n, NARROW, HALF), u0)
    u2 = tl.where(first + 2 < n, load_bits(x, first + 2, first + 2 < n, NARROW, HALF), u1)
    u3 = tl.where(first + 3 < n, load_bits(x, first + 3, first + 3 < n, NARROW, HALF), u0)
    largest = tl.maximum(
        tl.maximum(u0 & 0x7FFFFFFF, u1 & 0x7FFFFFFF), tl.maximum(u2 & 0x7FFFFFFF, u3 & 0x7FFFFFFF)
    )
    c0, c1, c2, c3 = _lift(
        _scaled(u0, largest), _scaled(u1, largest), _scaled(u2, largest), _scaled(u3, largest)
    )
    c0 = (c0 + _NEGABINARY) ^ _NEGABINARY
    c1 = (c1 + _NEGABINARY) ^ _NEGABINARY
    c2 = (c2 + _NEGABINARY) ^ _NEGABINARY
    c3 = (c3 + _NEGABINARY) ^ _NEGABINARY
    low = (2 * (largest >> 23) + 3).to(tl.uint64)
    high = low & 0
    position = tl.full([TILE], 9, tl.int32)
    significant = tl.zeros([TILE], tl.int32)
    for t in range(32):
        k = 31 - t
        plane = ((c0 >> k) & 1) | (((c1 >> k) & 1) << 1) | (((c2 >> k) & 1) << 2) | (((c3 >> k) & 1) << 3)
        entry = tl.load(table + significant * 16 + plane)
        code = (entry & 255).to(tl.uint64)
        at = (position & 63).to(tl.uint64)
        spill = (code >> 1) >> (63 - at)
        low = low | tl.where(position < 64, code << at, 0)
        high = high | tl.where(position < 64, spill, tl.where(position < 128, code << at, 0))
        position += (entry >> 8) & 255
        significant = entry >> 16
    classes = (_class(u0) << 1) | (_class(u1) << 3) | (_class(u2) << 5) | (_class(u3) << 7)
    coded = (largest > 0) & (largest < INF)
    low = tl.where(coded, low, tl.where(largest >= INF, classes, 0).to(tl.uint64))
    high = tl.where(coded, high, 0)
    low, high = _keep(low, high, BUDGET)
    bit = block * BUDGET
    word = bit >> 5
    shift = (bit & 31).to(tl.uint64)
    x0 = low << shift
    x1 = (high << shift) | ((low >> 1) >> (63 - shift))
    x2 = (high >> 1) >> (63 - shift)
    _put(words, word, x0, 0, live, BUDGET)
    _put(words, word, x0 >> 32, 1, live, BUDGET)
    _put(words, word, x1, 2, live, BUDGET)
    _put(words, word, x1 >> 32, 3, live, BUDGET)
    _put(words, word, x2, 4, live, BUDGET)


@triton.jit
def _put(words, word, bits, J: tl.constexpr, live, BUDGET: tl.constexpr):
    """Write the low 32 bits of ``bits`` to word number ``word + J``."""
    part = (bits & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    if BUDGET % 32 == 0:
        if J < BUDGET // 32:
            tl.store(words + word + J, part, mask=live)
    else:
        tl.atomic_or(words + word + J, part, mask=live & (part != 0))


@triton.jit
def _get(words, at, end):
    """A word as uint64; 0 beyond the end."""
    return tl.load(words + at, mask=at < end, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _plane_bits(words, table, block, end, BUDGET: tl.constexpr, TILE: tl.constexpr):
    """A block's header (9 bits) and its four negabinary coefficients."""
    bit = block * BUDGET
    word = bit >> 5
    shift = (bit & 31).to(tl.uint64)
    x0 = _get(words, word, end) | (_get(words, word + 1, end) << 32)
    x1 = _get(words, word + 2, end) | (_get(words, word + 3, end) << 32)
    x2 = _get(words, word + 4, end)
    low = (x0 >> shift) | ((x1 << 1) << (63 - shift))
    high = (x1 >> shift) | ((x2 << 1) << (63 - shift))
    low, high = _keep(low, high, BUDGET)
    header = (low & 511).to(tl.int32)
    low = (low >> 9) | (high << 55)
    high = high >> 9
    left = tl.full([TILE], BUDGET - 9, tl.int32)
    significant = tl.zeros([TILE], tl.int32)
    c0 = tl.zeros([TILE], tl.int32)
    c1, c2, c3 = c0, c0, c0
    for t in range(32):
        k = 31 - t
        whole = significant == 4
        index = (tl.minimum(left, 7) * 4 + tl.minimum(significant, 3)) * 128 + (low & 127).to(tl.int32)
        entry = tl.load(table + index)
        plane = tl.where(whole, (low & 15).to(tl.int32), entry & 255)
        taken = tl.where(whole, 4, (entry >> 8) & 255)
        significant = tl.where(whole, 4, entry >> 16)
        left = tl.maximum(left - taken, 0)
        by = taken.to(tl.uint64)
        low = (low >> by) | ((high << 1) << (63 - by))
        high = high >> by
        c0 |= (plane & 1) << k
        c1 |= ((plane >> 1) & 1) << k
        c2 |= ((plane >> 2) & 1) << k
        c3 |= ((plane >> 3) & 1) << k
    return header, c0, c1, c2, c3


@triton.jit
def _float_bits(i, exponent, LIMIT: tl.constexpr):
    """fp32 bits of i * 2**exponent: one rounding, ties to even, subnormals kept, at most LIMIT (bits)."""
    wide = i.to(tl.int64)
    size = tl.where(wide < 0, -wide, wide)
    rest = size
    top = tl.zeros_like(i)
    for step in tl.static_range(5):
        by = 16 >> step
        more = rest >= (1 << by)
        top += tl.where(more, by, 0)
        rest = tl.where(more, rest >> by, rest)
    biased = top + exponent + 127
    shift = top - 23 + tl.maximum(1 - biased, 0)
    right = tl.minimum(tl.maximum(shift, 1), 40).to(tl.int64)
    kept = size >> right
    lost = size & ((tl.full(right.shape, 1, tl.int64) << right) - 1)
    middle = tl.full(right.shape, 1, tl.int64) << (right - 1)
    kept += ((lost > middle) | ((lost == middle) & ((kept & 1) == 1))).to(tl.int64)
    r = tl.where(shift > 0, kept, size << tl.maximum(-shift, 0).to(tl.int64))
    bits = tl.where(biased >= 1, ((biased - 1).to(tl.int64) << 23) + r, r)
    bits = tl.where(size == 0, 0, tl.minimum(bits, LIMIT))
    return bits.to(tl.int32) | tl.where(i < 0, -2147483648, 0)


@triton.jit
def _special_bits(classes):
    """fp32 bits of a value of a block that is not finite."""
    infinite = tl.where(classes == 1, 0x7F800000, -8388608)  # 0xFF800000
    return tl.where(classes == 0, 0, tl.where(classes == 3, NAN, infinite))


@triton.jit
def _write(out, index, u, n, ADD: tl.constexpr, NARROW: tl.constexpr, HALF: tl.constexpr):
    live = index < n
    if ADD:
        if NARROW:
            u = widen(narrow(u, HALF), HALF)
        total = tl.load(out + index, mask=live, other=0.0) + u.to(tl.float32, bitcast=True)
        tl.store(out + index, total, mask=live)
    else:
        store_bits(out, index, u, live, NARROW, HALF)


@triton.jit
def _decode(
    words, out, table, n, end, BUDGET: tl.constexpr, LIMIT: tl.constexpr, ADD: tl.constexpr, TILE: tl.constexpr,
    NARROW: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    header, c0, c1, c2, c3 = _plane_bits(words, table, block, end, BUDGET, TILE)
    x, y, z, w = _unlift(
        (c0 ^ _NEGABINARY) - _NEGABINARY,
        (c1 ^ _NEGABINARY) - _NEGABINARY,
        (c2 ^ _NEGABINARY) - _NEGABINARY,
        (c3 ^ _NEGABINARY) - _NEGABINARY,
    )
    finite = (header & 1) == 1
    exponent = (header >> 1) - 157
    first = 4 * block
    u0 = tl.where(finite, _float_bits(x, exponent, LIMIT), _special_bits((header >> 1) & 3))
    u1 = tl.where(finite, _float_bits(y, exponent, LIMIT), _special_bits((header >> 3) & 3))
    u2 = tl.where(finite, _float_bits(z, exponent, LIMIT), _special_bits((header >> 5) & 3))
    u3 = tl.where(finite, _float_bits(w, exponent, LIMIT), _special_bits((header >> 7) & 3))
    _write(out, first, u0, n, ADD, NARROW, HALF)
    _write(out, first + 1, u1, n, ADD, NARROW, HALF)
    _write(out, first + 2, u2, n, ADD, NARROW, HALF)
    _write(out, first + 3, u3, n, ADD, NARROW, HALF)


def encode(x: torch.Tensor, payload: torch.Tensor, budget: int) -> None:
    """Encode x (flat) into payload (uint8, exactly sized), with blocks of ``budget`` bits."""
    words = words_of(payload).zero_()
    _encode[(triton.cdiv(-(-x.numel() // 4), _TILE),)](
        bits_of(x), words, _encode_table(x.device), x.numel(), BUDGET=budget, TILE=_TILE,
        NARROW=x.dtype != torch.float32, HALF=x.dtype == torch.float16,
    )  # fmt: skip
    if words.data_ptr() != payload.data_ptr():
        payload.copy_(words.view(torch.uint8))


def decode(payload: torch.Tensor, out: torch.Tensor, budget: int) -> None:
    """Decode payload (exactly sized) to out (flat; fp32, fp16, bf16)."""
    _run(payload, bits_of(out), out.dtype, budget, add=False)


def decode_add(payload: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, budget: int) -> None:
    """out (flat, fp32) += decoded values, first rounded to ``dtype``."""
    _run(payload, out, dtype, budget, add=True)


def _run(payload, out, dtype, budget, *, add):
    words = words_of(payload)
    limit = int(torch.tensor(torch.finfo(dtype).max, dtype=torch.float32).view(torch.int32))
    _decode[(triton.cdiv(-(-out.numel() // 4), _TILE),)](
        words, out, _decode_table(out.device), out.numel(), words.numel(), BUDGET=budget, LIMIT=limit, ADD=add,
        TILE=_TILE, NARROW=dtype != torch.float32, HALF=dtype == torch.float16,
    )  # fmt: skip
