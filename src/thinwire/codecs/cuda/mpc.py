"""Triton kernels of ``mpc``. codecs/reference_mpc.py is the specification.

Encoding: residuals, bitmap and count of each group of 32 words; then, with the groups' places from a cumulative sum, the
words that are not zero. Decoding: words to their places, sums over segments, transposition, sums over the predecessors.
"""

# Triton types the kernels; mypy cannot.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference_mpc import GROUP, HEADER_WORDS, SEGMENT
from .values import is_aligned, words_of

_GROUPS = 4  # groups of a program: 32 x 32 bits each are spread over registers
_SEGMENT = tl.constexpr(SEGMENT)


@triton.jit
def _step1(words, index, live, n, DIM: tl.constexpr):
    """Words less the ones DIM before them in their segment; 0 where not live."""
    word = tl.load(words + index, mask=live, other=0)
    follows = live & (index % _SEGMENT >= DIM)
    return word - tl.load(words + index - DIM, mask=follows, other=0)


@triton.jit
def _transposed(word, row):
    """[g, i] words and [l] rows to [g, l]: bit i of output word l is bit l of input word i; 0 for a row below 0."""
    i = tl.arange(0, 32)
    bit = (word[:, None, :] >> tl.maximum(row, 0)[None, :, None]) & 1
    turned = tl.sum(bit << i[None, None, :], axis=2)
    return tl.where((row >= 0)[None, :], turned, 0)


@triton.jit
def _residuals(words, coded, bitmaps, counts, n, groups, DIM: tl.constexpr, G: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    lane = tl.arange(0, 32)
    index = group[:, None] * 32 + lane[None, :]
    live = index < n
    word = _step1(words, index, live, n, DIM)
    # The word before a group's first one is the last of the group before it, in the same segment.
    before = index - 32
    chained = (before >= 0) & (index % _SEGMENT >= 32) & live
    last = _transposed(_step1(words, before, chained, n, DIM), tl.full([1], 31, tl.int32))
    turned = _transposed(word, lane)
    previous = tl.where(lane[None, :] == 0, last, _transposed(word, lane - 1))
    whole = (group + 1) * 32 <= n
    found = tl.where(whole[:, None], turned - previous, word)
    tl.store(coded + index, found, mask=live)
    present = (live & (found != 0)).to(tl.int32)
    tl.store(bitmaps + group, tl.sum(present << lane[None, :], axis=1), mask=group < groups)
    tl.store(counts + group, tl.sum(present, axis=1), mask=group < groups)


@triton.jit
def _pack(coded, ends, counts, out, n, groups, G: tl.constexpr):
    """Write the words that are not zero; ends: where each group's end."""
    group = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    index = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    word = tl.load(coded + index, mask=index < n, other=0)
    present = (word != 0).to(tl.int32)
    start = tl.load(ends + group, mask=group < groups, other=0) - tl.load(
        counts + group, mask=group < groups, other=0
    )
    place = start[:, None] + tl.cumsum(present, axis=1) - 1
    tl.store(out + place, word, mask=present != 0)


@triton.jit
def _unpack(bitmaps, ends, words, coded, n, groups, total, G: tl.constexpr):
    """The inverse of ``_pack``. words: the ``total`` ones that are not zero."""
    group = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    lane = tl.arange(0, 32)[None, :]
    index = group[:, None] * 32 + lane
    bitmap = tl.load(bitmaps + group, mask=group < groups, other=0)
    present = (bitmap[:, None] >> lane) & 1
    start = tl.load(ends + group, mask=group < groups, other=0) - tl.sum(present, axis=1)
    place = start[:, None] + tl.cumsum(present, axis=1) - 1
    there = (present != 0) & (place >= 0) & (place < total)
    tl.store(coded + index, tl.load(words + place, mask=there, other=0), mask=index < n)


@triton.jit
def _sums(coded, n):
    """In place: the whole groups of a segment become sums of all words up to each."""
    index = tl.program_id(0).to(tl.int64) * _SEGMENT + tl.arange(0, _SEGMENT)
    whole = index < n // 32 * 32
    word = tl.load(coded + index, mask=whole, other=0)
    tl.store(coded + index, tl.cumsum(word, axis=0), mask=whole)


@triton.jit
def _transpose(coded, n, G: tl.constexpr):
    """In place: each whole group becomes its transposed bit matrix."""
    group = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    index = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    whole = ((group + 1) * 32 <= n)[:, None] & (index >= 0)
    turned = _transposed(tl.load(coded + index, mask=whole, other=0), tl.arange(0, 32))
    tl.store(coded + index, turned, mask=whole)


@triton.jit
def _predecessors(coded, out, n, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Each word of a segment and all those at multiples of DIM before it, summed."""
    inside = tl.arange(0, ROWS)[:, None] * DIM + tl.arange(0, COLUMNS)[None, :]
    index = tl.program_id(0).to(tl.int64) * _SEGMENT + inside
    live = (tl.arange(0, COLUMNS)[None, :] < DIM) & (inside < _SEGMENT) & (index < n)
    word = tl.load(coded + index, mask=live, other=0)
    tl.store(out + index, tl.cumsum(word, axis=0), mask=live)


def encode(x: torch.Tensor, payload: torch.Tensor, dim: int) -> int:
    """Encode x (flat) into payload (uint8, the largest size); returns the bytes written. Waits for the device."""
    words = _padded_words(x)
    n = words.numel()
    groups = -(-n // GROUP)
    out = payload if is_aligned(payload) else torch.empty_like(payload)
    target = out[: out.numel() // 4 * 4].view(torch.int32)
    head = HEADER_WORDS + groups
    total = 0
    if n:
        coded = torch.empty_like(words)
        counts = torch.empty(groups, dtype=torch.int32, device=x.device)
        grid = (triton.cdiv(groups, _GROUPS),)
        _residuals[grid](words, coded, target[HEADER_WORDS:], counts, n, groups, DIM=dim, G=_GROUPS)
        ends = counts.cumsum(0)
        _pack[grid](coded, ends, counts, target[head:], n, groups, G=_GROUPS)
        total = int(ends[-1])
    target[:HEADER_WORDS] = torch.tensor([n, total], dtype=torch.int32)
    nbytes = 4 * (head + total)
    if out is not payload:
        payload[:nbytes] = out[:nbytes]
    return nbytes


def header(payload: torch.Tensor, n: int) -> tuple[int, int, int]:
    """The header's two words, and the ones in the bitmaps of n words, or -1 if one stands for a word beyond n."""
    words = words_of(payload)
    bitmaps = words[HEADER_WORDS : HEADER_WORDS + -(-n // GROUP)]
    counted = int(_popcount(bitmaps).sum())
    if n % GROUP and int(bitmaps[-1]) & 0xFFFFFFFF & ~((1 << n % GROUP) - 1):
        counted = -1
    return int(words[0]) & 0xFFFFFFFF, int(words[1]) & 0xFFFFFFFF, counted


def decode(payload: torch.Tensor, out: torch.Tensor, dim: int) -> None:
    """Decode a payload whose ``header`` was checked to out (flat; fp32, fp16, bf16)."""
    if out.numel() == 0:
        return
    words = words_of(payload)
    n = -(-out.nbytes // 4)
    groups = -(-n // GROUP)
    bitmaps, packed = words[HEADER_WORDS : HEADER_WORDS + groups], words[HEADER_WORDS + groups :]
    ends = _popcount(bitmaps).cumsum(0)
    coded = torch.empty(n, dtype=torch.int32, device=out.device)
    whole = out.view(torch.int32) if out.nbytes % 4 == 0 and is_aligned(out) else torch.empty_like(coded)
    by_group, by_segment = (triton.cdiv(groups, _GROUPS),), (triton.cdiv(n, SEGMENT),)
    source = packed if packed.numel() else coded  # never read where nothing is present
    _unpack[by_group](bitmaps, ends, source, coded, n, groups, packed.numel(), G=_GROUPS)
    _sums[by_segment](coded, n)
    _transpose[by_group](coded, n, G=_GROUPS)
    rows = triton.next_power_of_2(-(-SEGMENT // dim))
    _predecessors[by_segment](coded, whole, n, DIM=dim, ROWS=rows, COLUMNS=triton.next_power_of_2(dim))
    if whole.data_ptr() != out.data_ptr():
        out.view(torch.uint8).copy_(whole.view(torch.uint8)[: out.nbytes])


def _padded_words(x: torch.Tensor) -> torch.Tensor:
    """The values' bytes as int32 words; two zero bytes after an odd number of 16-bit values."""
    if x.nbytes % 4:
        x = torch.cat([x.view(torch.int16), torch.zeros(1, dtype=torch.int16, device=x.device)])
    elif not is_aligned(x):
        x = x.clone()
    return x.view(torch.int32)


def _popcount(words: torch.Tensor) -> torch.Tensor:
    """Ones of each word, int64."""
    bits = words.long() & 0xFFFFFFFF
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) & 0xFFFFFFFF) >> 24
