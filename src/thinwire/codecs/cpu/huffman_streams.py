"""Bit streams of Huffman codes: blocks of 1024 symbols each have one. ``reference_huffman`` is the specification.

A stream is a chain of steps that wait for one another. So the encoder joins the codes of eight symbols, in vectors, before
it writes them, and the decoder looks 12 bits up at once and gets up to four symbols. Two streams are written and four
are read at a time, in buffers that stay in the L1 cache.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,assignment,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from ..reference_huffman import BLOCK, LIMIT
from .huffman import TABLE, lookup_single
from .spans import gather, load, read, span, store, write
from .vector_values import copy_bytes
from .vectors import convert, evens, fill, larger, largest, numbers, odds, reinterpret, select

STREAMS = 4
TILE = STREAMS * BLOCK
STREAM_NBYTES = BLOCK * LIMIT // 8 + 8  # of the longest stream, and what is read and written beyond it
_PER_LOOKUP = 4
ROW = BLOCK + 4 * _PER_LOOKUP  # symbols of a block, and what a lookup may write beyond them
_BLOCK, _ROW_NBYTES = np.uint64(BLOCK), np.uint64(STREAM_NBYTES)
_MOST = np.uint64(56)  # bits that can be written at once
_CODE = np.uint64(2**56 - 1)


@njit(nogil=True, cache=True)
def new_scratch():
    """What :func:`put_streams` works in: codes of four and of eight symbols, lengths of the latter, streams."""
    return (
        np.empty(TILE // 4, np.uint64),
        np.empty(TILE // 8, np.uint64),
        np.empty(TILE // 8, np.uint64),
        np.zeros(STREAMS * STREAM_NBYTES, np.uint8),
    )


@njit(nogil=True, cache=True)
def lend(scratch):
    """The spans of :func:`new_scratch`'s arrays; the caller's caller has to hold those."""
    fours, eights, lengths, streams = scratch
    return span(fours), span(eights), span(lengths), span(streams)


@njit(nogil=True, cache=True)
def put_streams(symbols, first, n, codes, scratch, out, sizes, at, end):
    """Write the streams of the n symbols (uint8) of a tile to ``out`` from ``at`` on, their sizes from ``sizes`` on.

    All arrays are spans, ``scratch`` is lent. first: of the tile, in ``symbols``. codes: of :func:`canonical`.
    Returns the ends of sizes and streams; the latter is ``end`` + 1 if there is no room for them before ``end``.
    Counts and indices are uint64.
    """
    fours, eights, lengths, streams = scratch
    longest = _join_codes(symbols, first, n & ~np.uint64(63), codes, fours, eights, lengths)
    blocks = (n + _BLOCK - np.uint64(1)) // _BLOCK
    for b in range(np.uint64(0), blocks, np.uint64(2)):
        here, there = min(n - b * _BLOCK, _BLOCK), np.uint64(0)
        if b + np.uint64(1) < blocks:
            there = min(n - (b + np.uint64(1)) * _BLOCK, _BLOCK)
        if there == _BLOCK and longest <= _MOST:
            here, there = _put_two(eights, lengths, b, streams)
        else:
            here = _put_one(symbols, first, b, here, codes, longest, scratch)
            if there:
                there = _put_one(symbols, first, b + np.uint64(1), there, codes, longest, scratch)
        if at + here + there > end:
            return sizes, end + np.uint64(1)
        for row, nbytes in ((b, here), (b + np.uint64(1), there)):
            if row < blocks:
                copy_bytes(streams, row * _ROW_NBYTES, out, at, nbytes)
                write(out, sizes, np.uint16(nbytes))
                sizes, at = sizes + np.uint64(2), at + nbytes
    return sizes, at


@njit(nogil=True, cache=True)
def _put_two(eights, lengths, b, streams):
    """Write the streams of whole blocks b and b + 1; returns the bytes of each."""
    start0, start1 = b * _ROW_NBYTES, (b + np.uint64(1)) * _ROW_NBYTES
    h0, f0, p0 = np.uint64(0), np.uint64(0), start0
    h1, f1, p1 = np.uint64(0), np.uint64(0), start1
    half = _BLOCK >> np.uint64(3)
    for j in range(b * half, (b + np.uint64(1)) * half):
        k = j + half
        h0, f0, p0 = _put(read(eights, j, np.uint64), read(lengths, j, np.uint64), streams, h0, f0, p0)
        h1, f1, p1 = _put(read(eights, k, np.uint64), read(lengths, k, np.uint64), streams, h1, f1, p1)
    seven, three = np.uint64(7), np.uint64(3)
    return p0 - start0 + ((f0 + seven) >> three), p1 - start1 + ((f1 + seven) >> three)


@njit(nogil=True, cache=True)
def _put_one(symbols, first, b, count, codes, longest, scratch):
    """Write the stream of block b of the tile at ``first``, which has ``count`` symbols; returns the bytes."""
    fours, eights, lengths, streams = scratch
    start, whole = b * _BLOCK, count & ~np.uint64(63)
    held, filled, p = np.uint64(0), np.uint64(0), b * _ROW_NBYTES
    if longest <= _MOST:
        for j in range(start >> np.uint64(3), (start + whole) >> np.uint64(3)):
            code, length = read(eights, j, np.uint64), read(lengths, j, np.uint64)
            held, filled, p = _put(code, length, streams, held, filled, p)
    else:
        for j in range(start >> np.uint64(2), (start + whole) >> np.uint64(2)):
            code = read(fours, j, np.uint64)
            held, filled, p = _put(code & _CODE, code >> np.uint64(56), streams, held, filled, p)
    for j in range(first + start + whole, first + start + count):
        code = np.uint64(read(codes, np.uint64(read(symbols, j, np.uint8)), np.uint32))
        held, filled, p = _put(code & np.uint64(0xFFFFFF), code >> np.uint64(24), streams, held, filled, p)
    return p - b * _ROW_NBYTES + ((filled + np.uint64(7)) >> np.uint64(3))


@njit(nogil=True, cache=True, forceinline=True)
def _put(code, length, into, held, filled, p):
    """Write up to 56 bits. held: under 8 bits that are not written for good yet; filled: their number; p: the next byte."""
    held |= code << filled
    write(into, p, held)
    filled += length
    return held >> (filled & np.uint64(56)), filled & np.uint64(7), p + (filled >> np.uint64(3))


@njit(nogil=True, cache=True)
def _join_codes(symbols, start, count, codes, fours, eights, lengths):
    """The codes of each four symbols (lengths in their top bytes) and of each eight; returns the longest of these.

    count: of symbols from ``start`` on, a multiple of 64. An eight of more than 56 bits does not fit.
    """
    longest = fill(np.uint64(0), 8)
    for j in range(np.uint64(0), count, np.uint64(64)):
        a, b = _four(symbols, start + j, codes), _four(symbols, start + j + np.uint64(32), codes)
        store(fours, j >> np.uint64(2), a)
        store(fours, (j >> np.uint64(2)) + np.uint64(8), b)
        first, second = evens(a, b), odds(a, b)
        store(eights, j >> np.uint64(3), (first & _CODE) | ((second & _CODE) << (first >> 56)))
        both = (first >> 56) + (second >> 56)
        store(lengths, j >> np.uint64(3), both)
        longest = larger(longest, both)
    return largest(longest)


@njit(nogil=True, cache=True, forceinline=True)
def _four(symbols, first, codes):
    """The codes of 32 symbols as eight codes of four, their lengths in the top bytes."""
    pairs = convert(reinterpret(load(symbols, first, 32), np.uint16), np.uint32)
    a, b = gather(codes, pairs & 0xFF), gather(codes, pairs >> 8)
    two = reinterpret((a | ((b & 0xFFFFFF) << (a >> 24))) + (b & np.uint32(0xFF000000)), np.uint64)
    length, upper = (two >> 24) & 0xFF, two >> 32
    code = (two & 0xFFFFFF) | ((upper & 0xFFFFFF) << length)
    return code | ((length + (upper >> 24)) << 56)


@njit(nogil=True, cache=True)
def lookup(lengths, several):
    """A table (uint64) over 12 bits: how many of them are up to 4 symbols, the symbols' number << 8, symbols << 32."""
    single = np.empty(TABLE, np.uint32)
    lookup_single(lengths, single)
    _look_ahead(single, several)


@njit(nogil=True, cache=True)
def _look_ahead(single, several):
    """The table of several symbols from that of one."""
    one, table = span(single), span(several)
    for first in range(np.uint64(0), np.uint64(TABLE), np.uint64(16)):
        ahead = numbers(np.uint32, 16) + np.uint32(first)
        bits = count = packed = fill(np.uint32(0), 16)
        for i in range(_PER_LOOKUP):
            entry = gather(one, ahead >> bits)
            fits = bits + (entry >> 8) < np.uint32(LIMIT + 1)  # if one does not, neither do those behind it
            packed = select(fits, packed | ((entry & 0xFF) << np.uint32(8 * i)), packed)
            count = select(fits, count + 1, count)
            bits = select(fits, bits + (entry >> 8), bits)
        found = (convert(packed, np.uint64) << 32) | convert(bits | (count << 8), np.uint64)
        store(table, first, found)


@njit(nogil=True, cache=True)
def get_streams(payload, sizes, at, m, several, streams, symbols):
    """Read the m symbols of a tile from the streams at ``at``; returns the ends of sizes and streams.

    All arrays are spans. streams, symbols: uint8, zeroed once, STREAMS rows of STREAM_NBYTES and of ROW; each has a
    block. Counts and indices are uint64.
    """
    sizes, at = load_streams(payload, sizes, at, m, streams)
    _get_symbols(streams, several, symbols, m)
    return sizes, at


@njit(nogil=True, cache=True)
def load_streams(payload, sizes, at, m, streams):
    """Copy the streams of a tile to the rows of ``streams``; returns the ends of sizes and streams."""
    for row in range((m + _BLOCK - np.uint64(1)) // _BLOCK):
        nbytes = np.uint64(read(payload, sizes, np.uint16))
        copy_bytes(payload, at, streams, row * _ROW_NBYTES, nbytes)
        sizes, at = sizes + np.uint64(2), at + nbytes
    return sizes, at


@njit(nogil=True, cache=True, forceinline=True)
def window(streams, p):
    """At least 57 bits from bit p of a span on."""
    return read(streams, p >> np.uint64(3), np.uint64) >> (p & np.uint64(7))


@njit(nogil=True, cache=True, forceinline=True)
def _get_several(streams, several, symbols, i, p):
    """Four lookups of up to four symbols each, from one window; returns the next symbol and bit."""
    ahead, passed = window(streams, p), np.uint64(0)
    for _ in range(4):
        entry = read(several, ahead & np.uint64(TABLE - 1), np.uint64)
        write(symbols, i + ((passed >> np.uint64(8)) & np.uint64(255)), np.uint32(entry >> np.uint64(32)))
        passed += entry  # bits and symbols at once: neither sum leaves its byte
        ahead >>= entry & np.uint64(63)
    return i + ((passed >> np.uint64(8)) & np.uint64(255)), p + (passed & np.uint64(255))


@njit(nogil=True, cache=True)
def _get_symbols(streams, several, symbols, m):
    """Decode the m symbols (uint64) of up to four blocks. At most 12 bits each: damaged streams stay inside their rows."""
    row, bits = np.uint64(ROW), np.uint64(8 * STREAM_NBYTES)
    i0, i1, i2, i3 = np.uint64(0), row, np.uint64(2) * row, np.uint64(3) * row
    p0, p1, p2, p3 = np.uint64(0), bits, np.uint64(2) * bits, np.uint64(3) * bits
    if m == TILE:
        while max(max(i0, i1 - row), max(i2 - np.uint64(2) * row, i3 - np.uint64(3) * row)) < _BLOCK:
            i0, p0 = _get_several(streams, several, symbols, i0, p0)
            i1, p1 = _get_several(streams, several, symbols, i1, p1)
            i2, p2 = _get_several(streams, several, symbols, i2, p2)
            i3, p3 = _get_several(streams, several, symbols, i3, p3)
    for r, i, p in (
        (np.uint64(0), i0, p0),
        (np.uint64(1), i1, p1),
        (np.uint64(2), i2, p2),
        (np.uint64(3), i3, p3),
    ):
        if r * _BLOCK < m:
            end = r * row + min(_BLOCK, m - r * _BLOCK)
            while i < end:
                i, p = _get_several(streams, several, symbols, i, p)
