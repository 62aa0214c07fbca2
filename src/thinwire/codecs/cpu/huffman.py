"""Canonical Huffman codes of at most 12 bits over bytes. ``reference_huffman`` is the specification.

Every bit stream is a chain of steps that wait for one another, so that the streams of blocks of 1024 symbols are
written two and read four at a time, in buffers that stay in the L1 cache. The decoder looks 12 bits up at once and gets
up to four symbols.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-untyped,assignment"

from __future__ import annotations

import numpy as np
from numba import njit

from ..reference_huffman import BLOCK, LENGTHS_NBYTES, LIMIT

SYMBOLS = 256
TABLE = 1 << LIMIT
STREAMS = 4
TILE = STREAMS * BLOCK
STREAM_NBYTES = BLOCK * LIMIT // 8 + 8  # of the longest stream, and what is read and written beyond it
_PER_LOOKUP = 4
ROW = BLOCK + 4 * _PER_LOOKUP  # symbols of a block, and what a lookup may write beyond them


@njit(nogil=True, cache=True)
def code_lengths(counts, lengths):
    """Fill ``lengths`` (int64, 256 zeros); see the reference."""
    order = np.argsort(counts, kind="mergesort")
    first = 0
    while first < SYMBOLS and counts[order[first]] == 0:
        first += 1
    k = SYMBOLS - first
    if k == 1:
        lengths[order[first]] = 1
    if k < 2:
        return
    # Two queues, both sorted: the symbols, and the subtrees in the order in which they are made.
    weight = np.empty(2 * k, np.int64)
    parent = np.zeros(2 * k, np.int64)
    for i in range(k):
        weight[i] = counts[order[first + i]]
    leaf, tree, made = 0, k, k
    while made < 2 * k - 1:
        total = np.int64(0)
        for _ in range(2):
            if tree >= made or (leaf < k and weight[leaf] <= weight[tree]):
                chosen = leaf
                leaf += 1
            else:
                chosen = tree
                tree += 1
            total += weight[chosen]
            parent[chosen] = made
        weight[made] = total
        made += 1
    number = np.zeros(LIMIT + 1, np.int64)
    depth = np.zeros(2 * k, np.int64)
    for i in range(2 * k - 3, -1, -1):
        depth[i] = depth[parent[i]] + 1
        if i < k:
            number[min(depth[i], LIMIT)] += 1
    used = np.int64(0)
    for d in range(1, LIMIT + 1):
        used += number[d] << (LIMIT - d)
    while used > TABLE:
        number[LIMIT] -= 1
        d = LIMIT - 1
        while number[d] == 0:
            d -= 1
        number[d] -= 1
        number[d + 1] += 2
        used -= 1
    at = first
    for d in range(LIMIT, 0, -1):
        for _ in range(number[d]):
            lengths[order[at]] = d
            at += 1


@njit(nogil=True, cache=True)
def canonical(lengths, codes):
    """Codes with their first bit lowest, and the length in the top byte of each entry (uint32)."""
    code = 0
    for d in range(1, LIMIT + 1):
        for s in range(SYMBOLS):
            if lengths[s] == d:
                turned = 0
                for i in range(d):
                    turned |= ((code >> i) & 1) << (d - 1 - i)
                codes[s] = np.uint32(turned | (d << 24))
                code += 1
        code <<= 1


@njit(nogil=True, cache=True)
def put_lengths(lengths, out, at):
    """Write the table of code lengths to ``out[at:]``."""
    for i in range(LENGTHS_NBYTES):
        out[at + i] = np.uint8(lengths[2 * i] | (lengths[2 * i + 1] << 4))


@njit(nogil=True, cache=True)
def get_lengths(payload, at, lengths):
    """Read the table of code lengths at ``payload[at:]``."""
    for i in range(LENGTHS_NBYTES):
        pair = np.int64(payload[at + i])
        lengths[2 * i], lengths[2 * i + 1] = pair & 15, pair >> 4


@njit(nogil=True, cache=True)
def check_lengths(payload, at):
    """Whether the table of code lengths at ``payload[at:]`` is one of a prefix code."""
    used = 0
    for i in range(at, at + LENGTHS_NBYTES):
        pair = np.int64(payload[i])
        for length in (pair & 15, pair >> 4):
            if length > LIMIT:
                return False
            if length:
                used += 1 << (LIMIT - length)
    return used <= TABLE


@njit(nogil=True, cache=True)
def streams_nbytes(payload, sizes, blocks):
    """Bytes of the streams of so many blocks by their sizes at ``payload[sizes:]``; -1 if one is longer than any."""
    total = 0
    for b in range(blocks):
        nbytes = np.int64(payload[sizes + 2 * b]) | (np.int64(payload[sizes + 2 * b + 1]) << 8)
        if nbytes > BLOCK * LIMIT // 8:
            return -1
        total += nbytes
    return total


@njit(nogil=True, cache=True)
def put_streams(symbols, m, codes, streams, ends, out, sizes, at):
    """Write the streams of the m symbols of a tile to ``out[at:]``, their sizes to ``out[sizes:]``; returns both ends.

    The end of the streams is -1 if ``out`` is too short for them. symbols: a row for each block. streams (uint8,
    STREAM_NBYTES a row), ends (uint64, 3 a row): scratch.
    """
    for b in range(0, (m + BLOCK - 1) // BLOCK, 2):
        here = min(BLOCK, m - b * BLOCK)
        there = max(min(BLOCK, m - (b + 1) * BLOCK), 0)
        both = min(here, there) // 4 * 4
        _put_two(symbols[b], symbols[b + 1], both, codes, streams[b], streams[b + 1], ends[b], ends[b + 1])
        for row, count in ((b, here), (b + 1, there)):
            if count:
                stream = streams[row]
                nbytes = _put_rest(symbols[row], both, count, codes, stream, ends[row])
                if at + nbytes > out.size:
                    return sizes, -1
                for j in range(nbytes):
                    out[at + j] = stream[j]
                at += nbytes
                out[sizes], out[sizes + 1] = np.uint8(nbytes & 255), np.uint8(nbytes >> 8)
                sizes += 2
    return sizes, at


@njit(nogil=True, cache=True, inline="always")
def _put_four(symbols, j, codes, stream, held, filled, p):
    """Four codes become one before they meet the bits held, which every step has to wait for.

    held: under 8 bits that are not written for good yet; filled: their number; p: the next byte.
    """
    a, b = np.uint64(codes[symbols[j]]), np.uint64(codes[symbols[j + np.uint64(1)]])
    c, d = np.uint64(codes[symbols[j + np.uint64(2)]]), np.uint64(codes[symbols[j + np.uint64(3)]])
    code, length = np.uint64(0xFFFFFF), np.uint64(24)
    ab = (a & code) | ((b & code) << (a >> length))
    cd = (c & code) | ((d & code) << (c >> length))
    first = (a >> length) + (b >> length)
    held |= (ab | (cd << first)) << filled  # at most 7 + 48 bits
    _put_bytes(stream, p, held)
    filled += first + (c >> length) + (d >> length)
    return held >> (filled & np.uint64(56)), filled & np.uint64(7), p + (filled >> np.uint64(3))


@njit(nogil=True, cache=True, inline="always")
def _put_bytes(stream, p, held):
    """Store 64 bits from byte p on, the lowest first: the compiler makes one store of it."""
    for i in range(8):
        stream[p + np.uint64(i)] = np.uint8((held >> np.uint64(8 * i)) & np.uint64(255))


@njit(nogil=True, cache=True)
def _put_two(first, second, m, codes, first_stream, second_stream, first_end, second_end):
    """Write the codes of m (a multiple of 4) symbols of two blocks. Ends: bits held, their number, bytes written."""
    h0, f0, p0 = np.uint64(0), np.uint64(0), np.uint64(0)
    h1, f1, p1 = np.uint64(0), np.uint64(0), np.uint64(0)
    for j in range(np.uint64(0), np.uint64(m), np.uint64(4)):
        h0, f0, p0 = _put_four(first, j, codes, first_stream, h0, f0, p0)
        h1, f1, p1 = _put_four(second, j, codes, second_stream, h1, f1, p1)
    first_end[0], first_end[1], first_end[2] = h0, f0, p0
    second_end[0], second_end[1], second_end[2] = h1, f1, p1


@njit(nogil=True, cache=True)
def _put_rest(symbols, done, m, codes, stream, end):
    """Write the codes from symbol ``done`` (a multiple of 4) on; returns the bytes that the whole stream fills."""
    held, filled, p = end[0], end[1], end[2]
    for j in range(np.uint64(done), np.uint64(m // 4 * 4), np.uint64(4)):
        held, filled, p = _put_four(symbols, j, codes, stream, held, filled, p)
    for j in range(np.uint64(m // 4 * 4), np.uint64(m)):
        last = np.uint64(codes[symbols[j]])
        held |= (last & np.uint64(0xFFFFFF)) << filled
        filled += last >> np.uint64(24)
    _put_bytes(stream, p, held)
    return np.int64(p) + (np.int64(filled) + 7) // 8


@njit(nogil=True, cache=True)
def lookup_single(lengths, single):
    """A table over 12 bits: symbol, length << 8."""
    codes = np.zeros(SYMBOLS, np.uint32)
    canonical(lengths, codes)
    for v in range(TABLE):
        single[v] = LIMIT << 8  # what no code begins with
    for s in range(SYMBOLS):
        d = lengths[s]
        if d:
            for v in range(codes[s] & np.uint32(0xFFFFFF), TABLE, 1 << d):
                single[v] = s | (d << 8)


@njit(nogil=True, cache=True)
def lookup(lengths, single, several):
    """Tables over 12 bits. single: symbol, length << 8. several: up to 4 symbols, their number << 32, bits << 40."""
    lookup_single(lengths, single)
    for v in range(TABLE):
        bits, count, packed = 0, 0, 0
        while count < _PER_LOOKUP:
            entry = np.int64(single[v >> bits])
            if bits + (entry >> 8) > LIMIT:
                break
            packed |= (entry & 255) << (8 * count)
            bits += entry >> 8
            count += 1
        several[v] = np.uint64(packed | (count << 32) | (bits << 40))


@njit(nogil=True, cache=True)
def get_streams(payload, sizes, at, m, single, several, streams, symbols):
    """Read the m symbols of a tile from the streams at ``payload[at:]``; returns the ends of sizes and streams.

    streams: uint8, STREAM_NBYTES a row; symbols: uint8, ROW a row; both zeroed once, with a row for each block.
    """
    sizes, at = load_streams(payload, sizes, at, m, streams)
    _get_symbols(streams, single, several, symbols, m)
    return sizes, at


@njit(nogil=True, cache=True)
def load_streams(payload, sizes, at, m, streams):
    """Copy the streams of a tile to the rows of ``streams``; returns the ends of sizes and streams."""
    for row in range((m + BLOCK - 1) // BLOCK):
        nbytes = np.int64(payload[sizes]) | (np.int64(payload[sizes + 1]) << 8)
        sizes += 2
        stream = streams[row]
        for j in range(nbytes):
            stream[j] = payload[at + j]
        at += nbytes
    return sizes, at


@njit(nogil=True, cache=True, inline="always")
def window(stream, p):
    """At least 57 bits of a stream from bit p on. The compiler makes one load of the eight."""
    byte, bits = p >> np.uint64(3), np.uint64(0)
    for i in range(8):
        bits |= np.uint64(stream[byte + np.uint64(i)]) << np.uint64(8 * i)
    return bits >> (p & np.uint64(7))


@njit(nogil=True, cache=True, inline="always")
def _get_several(stream, several, symbols, i, p):
    """Four lookups of up to four symbols each, from one window; returns the next symbol and bit."""
    ahead = window(stream, p)
    for _ in range(4):
        entry = several[ahead & np.uint64(TABLE - 1)]
        symbols[i] = np.uint8(entry & np.uint64(255))
        symbols[i + np.uint64(1)] = np.uint8((entry >> np.uint64(8)) & np.uint64(255))
        symbols[i + np.uint64(2)] = np.uint8((entry >> np.uint64(16)) & np.uint64(255))
        symbols[i + np.uint64(3)] = np.uint8((entry >> np.uint64(24)) & np.uint64(255))
        i += (entry >> np.uint64(32)) & np.uint64(255)
        bits = entry >> np.uint64(40)
        ahead >>= bits
        p += bits
    return i, p


@njit(nogil=True, cache=True)
def _get_symbols(streams, single, several, symbols, m):
    """Decode the m symbols of up to four blocks. At most 12 bits each: damaged streams stay inside their rows."""
    done, bit = np.zeros(STREAMS, np.uint64), np.zeros(STREAMS, np.uint64)
    if m == TILE:
        e0, e1, e2, e3 = symbols[0], symbols[1], symbols[2], symbols[3]
        s0, s1, s2, s3 = streams[0], streams[1], streams[2], streams[3]
        i0, i1, i2, i3 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
        p0, p1, p2, p3 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
        last = np.uint64(BLOCK - 4 * _PER_LOOKUP)
        while max(max(i0, i1), max(i2, i3)) <= last:
            i0, p0 = _get_several(s0, several, e0, i0, p0)
            i1, p1 = _get_several(s1, several, e1, i1, p1)
            i2, p2 = _get_several(s2, several, e2, i2, p2)
            i3, p3 = _get_several(s3, several, e3, i3, p3)
        done[0], done[1], done[2], done[3] = i0, i1, i2, i3
        bit[0], bit[1], bit[2], bit[3] = p0, p1, p2, p3
    for row in range((m + BLOCK - 1) // BLOCK):
        i, p, stop = done[row], bit[row], np.uint64(min(BLOCK, m - row * BLOCK))
        stream, into = streams[row], symbols[row]
        while i + np.uint64(4 * _PER_LOOKUP) <= stop:
            i, p = _get_several(stream, several, into, i, p)
        while i < stop:
            found = np.uint64(single[window(stream, p) & np.uint64(TABLE - 1)])
            into[i] = np.uint8(found & np.uint64(255))
            p += found >> np.uint64(8)
            i += np.uint64(1)
