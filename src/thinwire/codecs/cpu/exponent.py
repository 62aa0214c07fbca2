"""Kernels of ``exponent``. ``reference_exponent`` is the specification.

Four blocks at a time go through buffers that stay in the L1 cache: exponents and rests of their values, and their bit
streams (``huffman``).
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,assignment,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from ..reference_exponent import HEADER_NBYTES, SPARE_ABOVE, SPARE_BELOW
from ..reference_huffman import BLOCK, LENGTHS_NBYTES
from .exponent_planes import (
    get_planes,
    merge,
    merge_upper,
    plane_nbytes,
    put_planes,
    split,
    split_upper,
)
from .exponent_survey import all_bits, survey
from .huffman import (
    SYMBOLS,
    TABLE,
    canonical,
    check_lengths,
    code_lengths,
    get_lengths,
    put_lengths,
    streams_nbytes,
)
from .huffman_streams import (
    ROW,
    STREAM_NBYTES,
    STREAMS,
    TILE,
    get_streams,
    lend,
    lookup,
    new_scratch,
    put_streams,
)
from .spans import span
from .vector_values import copy_bytes


@njit(nogil=True, cache=True)
def widen(counts, symbols):
    """Give every exponent between those seen, some beside them and that of zero a count, so that later messages fit.

    symbols: number of exponents that the dtype has.
    """
    lowest, highest = range_of(counts)
    counts[0] = max(counts[0], 1)
    for s in range(max(lowest - SPARE_BELOW, 0), min(highest + SPARE_ABOVE, symbols - 1) + 1):
        counts[s] = max(counts[s], 1)


@njit(nogil=True, cache=True)
def range_of(numbers):
    """The lowest exponent but 0, and the highest, with a number that is not 0; 1 and 0 if there is none but 0."""
    lowest, highest = 1, 0
    for s in range(SYMBOLS - 1, 0, -1):
        if numbers[s]:
            lowest, highest = s, max(highest, s)
    return lowest, highest


@njit(nogil=True, cache=True)
def encode(x, mantissa_bits, spare, lengths, out):
    """Code with a codebook made for x. Returns the bytes written.

    x: uint16 or uint32 bits. spare: make a codebook that later messages can use. lengths: int64, 256 zeros, becomes the
    codebook. out: uint8, at least the raw size and the header.
    """
    n, raw_nbytes = x.size, x.size * x.itemsize
    counts = np.empty(SYMBOLS, np.int64)
    survey(x, mantissa_bits, counts)
    drop = 0
    if mantissa_bits == 23:
        ored = all_bits(x)
        if ored & 0xFFFF == 0:
            drop = 16
        elif ored & 0x1FFF == 0:
            drop = 13
    wide = counts.copy()
    if spare:
        widen(wide, 1 << (8 * x.itemsize - 1 - mantissa_bits))
    code_lengths(wide, lengths)
    coded = np.int64(0)
    for s in range(SYMBOLS):
        coded += counts[s] * lengths[s]
    blocks = (n + BLOCK - 1) // BLOCK
    most = LENGTHS_NBYTES + 2 * blocks + plane_nbytes(n, mantissa_bits - drop + 1) + coded // 8 + blocks
    out[0], out[1], out[2], out[3] = 0, 0, 0, 0
    if n == 0 or most >= raw_nbytes:
        data, head = span(x.view(np.uint8)), np.uint64(HEADER_NBYTES)
        copy_bytes(data, np.uint64(0), span(out), head, np.uint64(raw_nbytes))
        return HEADER_NBYTES + raw_nbytes
    out[0], out[1] = 1, drop
    put_lengths(lengths, out, HEADER_NBYTES)
    return _encode_blocks(x, mantissa_bits, drop, lengths, False, HEADER_NBYTES + LENGTHS_NBYTES, out)


@njit(nogil=True, cache=True)
def encode_again(x, mantissa_bits, drop, lengths, book, out):
    """Code in one pass with the codebook of an earlier message; returns the bytes written, -1 if that does not fit x.

    book: its id. out: uint8; what it holds if the codebook does not fit is of no use.
    """
    n = x.size
    sizes = HEADER_NBYTES
    planes = sizes + 2 * ((n + BLOCK - 1) // BLOCK)
    limit = HEADER_NBYTES + n * x.itemsize
    if n == 0 or planes + plane_nbytes(n, mantissa_bits - drop + 1) > limit:
        return -1
    out[0], out[1], out[2], out[3] = 2, drop, np.uint8(book & 255), np.uint8(book >> 8)
    return _encode_blocks(x, mantissa_bits, drop, lengths, True, sizes, out[:limit])


@njit(nogil=True, cache=True)
def _encode_blocks(x, mantissa_bits, drop, lengths, again, sizes, out):
    """Write sizes from ``out[sizes:]`` on, planes and streams; returns the end.

    again: -1 if there are exponents without a code, bits in the place of those dropped, or out is too short.
    """
    codes = np.zeros(SYMBOLS, np.uint32)
    canonical(lengths, codes)
    limits = range_of(lengths)
    exponents, rests = np.zeros(TILE, np.uint8), np.zeros(TILE, np.uint32)
    return _encode_tiles(
        x, mantissa_bits, drop, codes, limits, again, np.uint64(sizes), out, exponents, rests, new_scratch()
    )


@njit(nogil=True, cache=True)
def _encode_tiles(x, mantissa_bits, drop, codes, limits, again, sizes, out, exponents, rests, scratch):
    """:func:`_encode_blocks` with a codebook and what to work in."""
    n, kept, end = np.uint64(x.size), mantissa_bits - drop, np.uint64(out.size)
    planes = sizes + np.uint64(2 * ((x.size + BLOCK - 1) // BLOCK))
    at = planes + np.uint64(plane_nbytes(x.size, kept + 1))
    lowest, highest = limits
    values, into, code_of, symbols = span(x), span(out), span(codes), span(exponents)
    work = lend(scratch)
    for first in range(np.uint64(0), n, np.uint64(TILE)):
        m = min(np.uint64(TILE), n - first)
        if kept == 7:
            most, ored = split_upper(values, first, m, symbols, into, planes + first, np.uint8(lowest))
        else:
            most, ored = split(x[first : first + m], mantissa_bits, drop, exponents, rests, lowest)
            put_planes(rests, np.int64(first), np.int64(m), x.size, kept + 1, np.int64(planes), out)
        if again and (most > highest - lowest or ored & ((1 << drop) - 1)):
            return -1
        sizes, at = put_streams(symbols, np.uint64(0), m, code_of, work, into, sizes, at, end)
        if at > end:
            return -1
    return np.int64(at)


@njit(nogil=True, cache=True)
def check(payload, size, n, mantissa_bits, itemsize, book):
    """0 if decode may read the payload; else the index of what is wrong with it.

    payload: its first bytes, up to the blocks' sizes at least; size: of all of it. book: id of the codebook that
    is at hand, 0 for none.
    """
    if size < HEADER_NBYTES:
        return 1
    mode, drop, named = payload[0], payload[1], np.int64(payload[2]) | (np.int64(payload[3]) << 8)
    if mode > 2 or not (drop == 0 or (mantissa_bits == 23 and (drop == 13 or drop == 16))):
        return 3
    if mode == 2:
        if named == 0 or named != book:
            return 6
    elif named:
        return 3
    if mode == 0:
        return 3 if drop else 0 if size == HEADER_NBYTES + n * itemsize else 2
    blocks = (n + BLOCK - 1) // BLOCK
    at = HEADER_NBYTES + (LENGTHS_NBYTES if mode == 1 else 0)
    need = at + 2 * blocks + plane_nbytes(n, mantissa_bits - drop + 1)
    if size < need:
        return 1
    if mode == 1 and not check_lengths(payload, HEADER_NBYTES):
        return 4
    streams = streams_nbytes(payload, at, blocks)
    if streams < 0:
        return 5
    return 0 if need + streams == size else 2


@njit(nogil=True, cache=True)
def decode(payload, out, mantissa_bits, lengths):
    """payload: uint8, one that passed :func:`check`. out: uint16 or uint32 bits.

    lengths: the codebook (int64, 256) that mode 2 needs; in mode 1 it becomes that of the payload.
    """
    if payload[0] == 0:
        copy_bytes(
            span(payload),
            np.uint64(HEADER_NBYTES),
            span(out.view(np.uint8)),
            np.uint64(0),
            np.uint64(out.nbytes),
        )
        return
    sizes = HEADER_NBYTES
    if payload[0] == 1:
        get_lengths(payload, HEADER_NBYTES, lengths)
        sizes += LENGTHS_NBYTES
    several = np.empty(TABLE, np.uint64)
    lookup(lengths, several)
    exponents, rests = np.zeros(STREAMS * ROW, np.uint8), np.zeros(TILE, np.uint32)
    streams = np.zeros(STREAMS * STREAM_NBYTES, np.uint8)
    drop = np.int64(payload[1])
    _decode_tiles(payload, out, mantissa_bits, drop, np.uint64(sizes), several, streams, exponents, rests)


@njit(nogil=True, cache=True)
def _decode_tiles(payload, out, mantissa_bits, drop, sizes, several, streams, exponents, rests):
    """:func:`decode` from the sizes of the streams on, with tables and what to work in."""
    n, kept = np.uint64(out.size), mantissa_bits - drop
    planes = sizes + np.uint64(2 * ((out.size + BLOCK - 1) // BLOCK))
    at = planes + np.uint64(plane_nbytes(out.size, kept + 1))
    source, table, work, symbols, values = (
        span(payload),
        span(several),
        span(streams),
        span(exponents),
        span(out),
    )
    for first in range(np.uint64(0), n, np.uint64(TILE)):
        m = min(np.uint64(TILE), n - first)
        sizes, at = get_streams(source, sizes, at, m, table, work, symbols)
        if kept != 7:
            get_planes(payload, np.int64(first), np.int64(m), out.size, kept + 1, np.int64(planes), rests)
        for start in range(np.uint64(0), m, np.uint64(BLOCK)):
            row = start // np.uint64(BLOCK) * np.uint64(ROW)
            count = min(m - start, np.uint64(BLOCK))
            if kept == 7:
                merge_upper(symbols, row, source, planes + first + start, values, first + start, count)
            else:
                part = out[first + start : first + start + count]
                merge(exponents[row:], rests[start : start + count], part, mantissa_bits, drop)
