"""Canonical Huffman codes of at most 12 bits over bytes. ``reference_huffman`` is the specification.

Every bit stream is a chain of steps that wait for one another. So the encoder joins codes before it writes them, and
the decoder looks 12 bits up at once, gets up to four symbols, and reads the streams of four blocks of 1024 symbols at a
time, in buffers that stay in the L1 cache.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,assignment,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from ..reference_huffman import BLOCK, LENGTHS_NBYTES, LIMIT
from .vector_values import copy_bytes
from .vectors import convert, evens, fill, gather, lane, larger, largest, load, odds, reinterpret, span, store

SYMBOLS = 256
TABLE = 1 << LIMIT
STREAMS = 4
TILE = STREAMS * BLOCK
STREAM_NBYTES = BLOCK * LIMIT // 8 + 8  # of the longest stream, and what is read and written beyond it
_PER_LOOKUP = 4
_CODE = np.uint64(2**56 - 1)
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
def new_scratch():
    """What :func:`put_streams` works in: codes of four and of eight symbols, lengths of the latter, a stream."""
    return (
        np.empty(BLOCK // 4, np.uint64),
        np.empty(BLOCK // 8, np.uint64),
        np.empty(BLOCK // 8, np.uint64),
        np.zeros(STREAM_NBYTES, np.uint8),
    )


@njit(nogil=True, cache=True)
def put_streams(symbols, m, codes, scratch, out, sizes, at):
    """Write the streams of the m symbols of a tile to ``out[at:]``, their sizes to ``out[sizes:]``; returns both ends.

    The end of the streams is -1 if ``out`` is too short for them. symbols: a row for each block.
    """
    fours, eights, lengths, stream = scratch
    for row in range((m + BLOCK - 1) // BLOCK):
        block = symbols[row, : min(BLOCK, m - row * BLOCK)]
        nbytes = _put_stream(block, codes, fours, eights, lengths, stream)
        if at + np.int64(nbytes) > out.size:
            return sizes, -1
        copy_bytes(stream, np.uint64(0), out, np.uint64(at), nbytes)
        at += np.int64(nbytes)
        out[sizes], out[sizes + 1] = np.uint8(nbytes & np.uint64(255)), np.uint8(nbytes >> np.uint64(8))
        sizes += 2
    return sizes, at


@njit(nogil=True, cache=True)
def _put_stream(symbols, codes, fours, eights, lengths, stream):
    """Write the codes of the symbols of a block; returns the bytes.

    Each code that is written waits for the end of the one before it. So they are joined first, in vectors, four or eight
    to one.
    """
    count = np.uint64(symbols.size)
    whole = count & ~np.uint64(63)
    longest = _join_codes(symbols, whole, codes, fours, eights, lengths)
    four, eight, length, into = span(fours), span(eights), span(lengths), span(stream)
    held, filled, p = np.uint64(0), np.uint64(0), np.uint64(0)
    if longest <= 56:
        for j in range(whole >> np.uint64(3)):
            held, filled, p = _put(
                lane(load(eight, j, 1), 0), lane(load(length, j, 1), 0), into, held, filled, p
            )
    else:
        for j in range(whole >> np.uint64(2)):
            code = lane(load(four, j, 1), 0)
            held, filled, p = _put(code & _CODE, code >> np.uint64(56), into, held, filled, p)
    for j in range(whole, count):
        code = np.uint64(codes[symbols[j]])
        held, filled, p = _put(code & np.uint64(0xFFFFFF), code >> np.uint64(24), into, held, filled, p)
    return p + ((filled + np.uint64(7)) >> np.uint64(3))


@njit(nogil=True, cache=True, forceinline=True)
def _put(code, length, into, held, filled, p):
    """Write up to 56 bits. held: under 8 bits that are not written for good yet; filled: their number; p: the next byte."""
    held |= code << filled
    store(into, p, reinterpret(fill(held, 1), np.uint8))
    filled += length
    return held >> (filled & np.uint64(56)), filled & np.uint64(7), p + (filled >> np.uint64(3))


@njit(nogil=True, cache=True)
def _join_codes(symbols, count, codes, fours, eights, lengths):
    """The codes of each four symbols (lengths in their top bytes) and of each eight; returns the longest of these.

    count: a multiple of 64 (uint64). An eight of more than 56 bits does not fit.
    """
    source, code_of = span(symbols), span(codes)
    four, eight, length = span(fours), span(eights), span(lengths)
    longest = fill(np.uint64(0), 8)
    for j in range(np.uint64(0), count, np.uint64(64)):
        a, b = _four(source, j, code_of), _four(source, j + np.uint64(32), code_of)
        store(four, j >> np.uint64(2), a)
        store(four, (j >> np.uint64(2)) + np.uint64(8), b)
        first, second = evens(a, b), odds(a, b)
        store(eight, j >> np.uint64(3), (first & _CODE) | ((second & _CODE) << (first >> 56)))
        both = (first >> 56) + (second >> 56)
        store(length, j >> np.uint64(3), both)
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
def lookup(lengths, several):
    """A table over 12 bits: up to 4 symbols, their number << 32, their bits << 40."""
    single = np.empty(TABLE, np.uint16)
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
def get_streams(payload, sizes, at, m, several, streams, symbols):
    """Read the m symbols of a tile from the streams at ``payload[at:]``; returns the ends of sizes and streams.

    streams: uint8, STREAM_NBYTES a row; symbols: uint8, ROW a row; both zeroed once, with a row for each block.
    """
    sizes, at = load_streams(payload, sizes, at, m, streams)
    _get_symbols(streams, several, symbols, m)
    return sizes, at


@njit(nogil=True, cache=True)
def load_streams(payload, sizes, at, m, streams):
    """Copy the streams of a tile to the rows of ``streams``; returns the ends of sizes and streams."""
    for row in range((m + BLOCK - 1) // BLOCK):
        nbytes = np.int64(payload[sizes]) | (np.int64(payload[sizes + 1]) << 8)
        sizes += 2
        copy_bytes(payload, np.uint64(at), streams[row], np.uint64(0), np.uint64(nbytes))
        at += nbytes
    return sizes, at


@njit(nogil=True, cache=True, forceinline=True)
def window(stream, p):
    """At least 57 bits of a stream (a span) from bit p on."""
    return lane(reinterpret(load(stream, p >> np.uint64(3), 8), np.uint64), 0) >> (p & np.uint64(7))


@njit(nogil=True, cache=True, forceinline=True)
def _get_several(stream, several, symbols, i, p):
    """Four lookups of up to four symbols each, from one window; returns the next symbol and bit."""
    ahead = window(stream, p)
    for _ in range(4):
        entry = lane(load(several, ahead & np.uint64(TABLE - 1), 1), 0)
        store(symbols, i, reinterpret(fill(np.uint32(entry), 1), np.uint8))
        i += (entry >> np.uint64(32)) & np.uint64(255)
        bits = entry >> np.uint64(40)
        ahead >>= bits
        p += bits
    return i, p


@njit(nogil=True, cache=True)
def _get_symbols(streams, several, symbols, m):
    """Decode the m symbols of up to four blocks. At most 12 bits each: damaged streams stay inside their rows."""
    done, bit = np.zeros(STREAMS, np.uint64), np.zeros(STREAMS, np.uint64)
    table = span(several)
    if m == TILE:
        e0, e1, e2, e3 = span(symbols[0]), span(symbols[1]), span(symbols[2]), span(symbols[3])
        s0, s1, s2, s3 = span(streams[0]), span(streams[1]), span(streams[2]), span(streams[3])
        i0, i1, i2, i3 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
        p0, p1, p2, p3 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
        while max(max(i0, i1), max(i2, i3)) < np.uint64(BLOCK):
            i0, p0 = _get_several(s0, table, e0, i0, p0)
            i1, p1 = _get_several(s1, table, e1, i1, p1)
            i2, p2 = _get_several(s2, table, e2, i2, p2)
            i3, p3 = _get_several(s3, table, e3, i3, p3)
        done[0], done[1], done[2], done[3] = i0, i1, i2, i3
        bit[0], bit[1], bit[2], bit[3] = p0, p1, p2, p3
    for row in range((m + BLOCK - 1) // BLOCK):
        i, p, stop = done[row], bit[row], np.uint64(min(BLOCK, m - row * BLOCK))
        stream, into = span(streams[row]), span(symbols[row])
        while i < stop:
            i, p = _get_several(stream, table, into, i, p)
