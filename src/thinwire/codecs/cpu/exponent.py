"""Kernels of ``exponent``. ``reference_exponent`` is the specification.

Four blocks at a time go through buffers that stay in the L1 cache: exponents and rests of their values, and their bit
streams (``huffman``).
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,assignment,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from ..reference_exponent import HEADER_NBYTES, SPARE_ABOVE, SPARE_BELOW
from ..reference_huffman import BLOCK, LENGTHS_NBYTES
from .huffman import (
    ROW,
    STREAM_NBYTES,
    STREAMS,
    SYMBOLS,
    TABLE,
    TILE,
    canonical,
    check_lengths,
    code_lengths,
    get_lengths,
    get_streams,
    lookup,
    new_scratch,
    put_lengths,
    put_streams,
    streams_nbytes,
)
from .vectors import any_bit, convert, fill, larger, largest, load, select, span, store, zeros


@njit(nogil=True, cache=True)
def _survey(x, mantissa_bits, counts):
    """Count the exponents; returns all mantissas or-ed. Four tables: a run of one exponent does not wait for itself."""
    mask = np.uint32((1 << (8 * x.itemsize - 1 - mantissa_bits)) - 1)
    tables = np.zeros((4, SYMBOLS), np.uint32)
    ored = np.uint32(0)
    shift = np.uint32(mantissa_bits)
    whole = x.size // 4 * 4
    for j in range(0, whole, 4):
        a, b, c, d = np.uint32(x[j]), np.uint32(x[j + 1]), np.uint32(x[j + 2]), np.uint32(x[j + 3])
        tables[0, (a >> shift) & mask] += np.uint32(1)
        tables[1, (b >> shift) & mask] += np.uint32(1)
        tables[2, (c >> shift) & mask] += np.uint32(1)
        tables[3, (d >> shift) & mask] += np.uint32(1)
        ored |= a | b | c | d
    for j in range(whole, x.size):
        tables[0, (np.uint32(x[j]) >> shift) & mask] += np.uint32(1)
        ored |= np.uint32(x[j])
    for s in range(SYMBOLS):
        counts[s] = np.int64(tables[0, s]) + tables[1, s] + tables[2, s] + tables[3, s]
    return np.uint32(ored & np.uint32((1 << mantissa_bits) - 1))


@njit(nogil=True, cache=True)
def plane_nbytes(n, width):
    """Bytes of the planes of n rests of 8, 11 or 24 bits."""
    return n * (width // 8) + (3 * n + 7) // 8 * (width % 8 != 0)


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
    ored = _survey(x, mantissa_bits, counts)
    drop = 0
    if mantissa_bits == 23:
        if ored & np.uint32(0xFFFF) == 0:
            drop = 16
        elif ored & np.uint32(0x1FFF) == 0:
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
        data = x.view(np.uint8)
        for j in range(raw_nbytes):
            out[HEADER_NBYTES + j] = data[j]
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
    n = x.size
    kept = mantissa_bits - drop
    planes = sizes + 2 * ((n + BLOCK - 1) // BLOCK)
    at = planes + plane_nbytes(n, kept + 1)
    codes = np.zeros(SYMBOLS, np.uint32)
    canonical(lengths, codes)
    lowest, highest = range_of(lengths)
    exponents, rests = np.zeros((STREAMS, BLOCK), np.uint8), np.zeros(TILE, np.uint32)
    flat = exponents.reshape(TILE)
    scratch = new_scratch()
    for first in range(0, n, TILE):
        m = min(TILE, n - first)
        tile = x[first : first + m]
        if kept == 7:
            most, ored = _split_upper(tile, flat, out[planes + first : planes + first + m], lowest)
        else:
            most, ored = _split(tile, mantissa_bits, drop, flat, rests, lowest)
            _put_planes(rests, first, m, n, kept + 1, planes, out)
        if again and (most > highest - lowest or ored & ((1 << drop) - 1)):
            return -1
        sizes, at = put_streams(exponents, m, codes, scratch, out, sizes, at)
        if at < 0:
            return -1
    return at


@njit(nogil=True, cache=True)
def _split_upper(tile, exponents, rests, lowest):
    """Exponents and rests (uint8: sign, mantissa) of bf16 values, or of the upper halves of fp32 ones.

    Returns how far an exponent other than 0 is above ``lowest`` (under it: a large number), and all values or-ed.
    """
    values, into, rest = span(tile), span(exponents), span(rests)
    none, base = fill(np.uint8(0), 32), np.uint8(lowest)
    most, ored = none, zeros(values, 32)
    whole = np.uint64(tile.size) & ~np.uint64(31)
    for j in range(np.uint64(0), whole, np.uint64(32)):
        v = load(values, j, 32)
        ored = ored | v
        h = _upper_halves(v)
        e = convert(h >> 7, np.uint8)
        store(into, j, e)
        store(rest, j, convert((h & 127) | ((h >> 8) & 128), np.uint8))
        most = larger(most, select(e == np.uint8(0), none, e - base))  # modulo 256
    above, together = np.int64(largest(most)), np.int64(any_bit(ored))
    for j in range(whole, np.uint64(tile.size)):
        v = np.uint32(tile[j])
        together |= np.int64(v)
        h = np.uint32(v >> np.uint32(16)) if tile.itemsize == 4 else v
        e = np.uint8((h >> np.uint32(7)) & np.uint32(255))
        exponents[j] = e
        rests[j] = np.uint8((h & np.uint32(127)) | ((h >> np.uint32(8)) & np.uint32(128)))
        above = max(above, np.int64(np.uint8(e - base)) if e else np.int64(0))
    return above, together


def _upper_halves(v):
    """The bits of bf16 that a vector of 16-bit values is, or that fp32 values begin with."""


@overload(_upper_halves, jit_options={"forceinline": True})
def _upper_halves_overload(v):
    if v.dtype == types.uint16:
        return lambda v: v
    return lambda v: convert(v >> 16, np.uint16)


@njit(nogil=True, cache=True)
def _split(tile, mantissa_bits, drop, exponents, rests, lowest):
    """:func:`_split_upper` for any dtype. rests: uint32, without the ``drop`` low bits."""
    gone, kept = np.uint32(drop), mantissa_bits - drop
    low, sign, top = np.uint32((1 << kept) - 1), np.uint32(8 * tile.itemsize - 1), np.uint32(kept)
    most, base = np.uint8(0), np.uint8(lowest)
    ored = np.uint32(0)
    shift, mask = np.uint32(mantissa_bits), np.uint32((1 << (8 * tile.itemsize - 1 - mantissa_bits)) - 1)
    for j in range(tile.size):
        v = np.uint32(tile[j])
        e = np.uint8((v >> shift) & mask)
        exponents[j] = e
        ored |= v
        rests[j] = ((v >> gone) & low) | ((v >> sign) << top)
    for e in exponents[: tile.size]:
        above = np.uint8(e - base)  # modulo 256: large for those under the lowest
        most = max(most, np.uint8(above * np.uint8(e != 0)))
    return np.int64(most), np.int64(ored)


@njit(nogil=True, cache=True)
def _put_planes(rests, first, m, n, width, planes, out):
    """Write m rests from value ``first`` on to the planes of n values."""
    for p in range(width // 8):
        plane = out[planes + p * n + first : planes + p * n + first + m]
        for j in range(m):
            plane[j] = np.uint8((rests[j] >> np.uint32(8 * p)) & np.uint32(255))
    if width % 8:
        at = planes + n + 3 * first // 8
        whole = m // 8
        for g in range(whole):
            three = np.uint32(0)
            for i in range(8):
                three |= (rests[8 * g + i] >> np.uint32(8)) << np.uint32(3 * i)
            out[at + 3 * g] = np.uint8(three & np.uint32(255))
            out[at + 3 * g + 1] = np.uint8((three >> np.uint32(8)) & np.uint32(255))
            out[at + 3 * g + 2] = np.uint8(three >> np.uint32(16))
        three = np.uint32(0)
        for i in range(8 * whole, m):
            three |= (rests[i] >> np.uint32(8)) << np.uint32(3 * (i - 8 * whole))
        for i in range((3 * (m - 8 * whole) + 7) // 8):
            out[at + 3 * whole + i] = np.uint8((three >> np.uint32(8 * i)) & np.uint32(255))


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
    n = out.size
    if payload[0] == 0:
        data = out.view(np.uint8)
        for j in range(data.size):
            data[j] = payload[HEADER_NBYTES + j]
        return
    drop = np.int64(payload[1])
    kept = mantissa_bits - drop
    sizes = HEADER_NBYTES
    if payload[0] == 1:
        get_lengths(payload, HEADER_NBYTES, lengths)
        sizes += LENGTHS_NBYTES
    several = np.empty(TABLE, np.uint64)
    lookup(lengths, several)
    planes = sizes + 2 * ((n + BLOCK - 1) // BLOCK)
    at = planes + plane_nbytes(n, kept + 1)
    exponents, rests = np.zeros((STREAMS, ROW), np.uint8), np.zeros(TILE, np.uint32)
    streams = np.zeros((STREAMS, STREAM_NBYTES), np.uint8)
    shift, low = np.uint32(mantissa_bits), np.uint32((1 << kept) - 1)
    sign, top, gap = np.uint32(8 * out.itemsize - 1), np.uint32(kept), np.uint32(drop)
    for first in range(0, n, TILE):
        m = min(TILE, n - first)
        sizes, at = get_streams(payload, sizes, at, m, several, streams, exponents)
        if kept != 7:
            _get_planes(payload, first, m, n, kept + 1, planes, rests)
        for row in range((m + BLOCK - 1) // BLOCK):
            start, stop = row * BLOCK, min(m, (row + 1) * BLOCK)
            block, rest, exponent = out[first + start : first + stop], rests[start:stop], exponents[row]
            if kept == 7:
                _merge_upper(exponent, payload[planes + first + start : planes + first + stop], block)
            else:
                for j in range(stop - start):
                    v = (rest[j] & low) << gap
                    block[j] = v | ((rest[j] >> top) << sign) | (np.uint32(exponent[j]) << shift)


@njit(nogil=True, cache=True)
def _merge_upper(exponents, rests, values):
    """The inverse of :func:`_split_upper`."""
    source, rest, into = span(exponents), span(rests), span(values)
    whole = np.uint64(values.size) & ~np.uint64(31)
    for j in range(np.uint64(0), whole, np.uint64(32)):
        e, r = convert(load(source, j, 32), np.uint16), convert(load(rest, j, 32), np.uint16)
        _put_halves(into, j, (r & 127) | ((r & 128) << 8) | (e << 7))
    for j in range(whole, np.uint64(values.size)):
        r = np.uint32(rests[j])
        h = (
            (r & np.uint32(127))
            | ((r & np.uint32(128)) << np.uint32(8))
            | (np.uint32(exponents[j]) << np.uint32(7))
        )
        values[j] = h << np.uint32(16) if values.itemsize == 4 else h


def _put_halves(into, at, halves):
    """Write 32 values (16 bits), or fp32 values that begin with them and have zeros behind."""


@overload(_put_halves, jit_options={"forceinline": True})
def _put_halves_overload(into, at, halves):
    if into.dtype == types.uint16:
        return lambda into, at, halves: store(into, at, halves)
    return lambda into, at, halves: store(into, at, convert(halves, np.uint32) << 16)


@njit(nogil=True, cache=True)
def _get_planes(payload, first, m, n, width, planes, rests):
    plane = payload[planes + first : planes + first + m]
    for j in range(m):
        rests[j] = plane[j]
    for p in range(1, width // 8):
        plane = payload[planes + p * n + first : planes + p * n + first + m]
        for j in range(m):
            rests[j] |= np.uint32(plane[j]) << np.uint32(8 * p)
    if width % 8:
        at = planes + n + 3 * first // 8
        whole = m // 8
        for g in range(whole):
            three = np.uint32(payload[at + 3 * g]) | (np.uint32(payload[at + 3 * g + 1]) << np.uint32(8))
            three |= np.uint32(payload[at + 3 * g + 2]) << np.uint32(16)
            for i in range(8):
                rests[8 * g + i] |= ((three >> np.uint32(3 * i)) & np.uint32(7)) << np.uint32(8)
        three = np.uint32(0)
        for i in range((3 * (m - 8 * whole) + 7) // 8):
            three |= np.uint32(payload[at + 3 * whole + i]) << np.uint32(8 * i)
        for i in range(8 * whole, m):
            rests[i] |= ((three >> np.uint32(3 * (i - 8 * whole))) & np.uint32(7)) << np.uint32(8)
