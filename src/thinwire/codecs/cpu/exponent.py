"""Kernels of ``exponent``. ``reference_exponent`` is the specification.

Four blocks at a time go through buffers that stay in the L1 cache: exponents and rests of their values, and the words
of their bit streams. Every bit stream is a chain of steps that wait for one another, so that streams are written two
and read four at a time. The decoder looks 12 bits up at once and gets up to four exponents.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-untyped,assignment"

from __future__ import annotations

import numpy as np
from numba import njit

from ..reference_exponent import BLOCK, HEADER_NBYTES, LENGTHS_NBYTES, LIMIT

_TABLE = 1 << LIMIT
_SYMBOLS = 256
_STREAM_WORDS = BLOCK * LIMIT // 64 + 2  # uint64; the last two are read beyond the longest stream
_PER_LOOKUP = 4
_STREAMS = 4
_TILE = _STREAMS * BLOCK
_ROW = BLOCK + 4 * _PER_LOOKUP  # exponents of a block, and what a lookup may write beyond them


@njit(nogil=True, cache=True)
def _survey(x, mantissa_bits, counts):
    """Count the exponents; returns all mantissas or-ed. Four tables: a run of one exponent does not wait for itself."""
    mask = np.uint32((1 << (8 * x.itemsize - 1 - mantissa_bits)) - 1)
    tables = np.zeros((4, _SYMBOLS), np.uint32)
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
    for s in range(_SYMBOLS):
        counts[s] = np.int64(tables[0, s]) + tables[1, s] + tables[2, s] + tables[3, s]
    return np.uint32(ored & np.uint32((1 << mantissa_bits) - 1))


@njit(nogil=True, cache=True)
def _code_lengths(counts, lengths):
    """Fill ``lengths`` (int64, 256 zeros); see the reference."""
    order = np.argsort(counts, kind="mergesort")
    first = 0
    while first < _SYMBOLS and counts[order[first]] == 0:
        first += 1
    k = _SYMBOLS - first
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
    while used > _TABLE:
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
def _canonical(lengths, codes):
    """Codes with their first bit lowest, and the length in the top byte of each entry (uint32)."""
    code = 0
    for d in range(1, LIMIT + 1):
        for s in range(_SYMBOLS):
            if lengths[s] == d:
                turned = 0
                for i in range(d):
                    turned |= ((code >> i) & 1) << (d - 1 - i)
                codes[s] = np.uint32(turned | (d << 24))
                code += 1
        code <<= 1


@njit(nogil=True, cache=True)
def _plane_nbytes(n, width):
    """Bytes of the planes of n rests of 8, 11 or 24 bits."""
    return n * (width // 8) + (3 * n + 7) // 8 * (width % 8 != 0)


@njit(nogil=True, cache=True)
def encode(x, mantissa_bits, out):
    """x: uint16 or uint32 bits. out: uint8, at least the raw size and the header. Returns the bytes written."""
    n, raw_nbytes = x.size, x.size * x.itemsize
    counts, lengths = np.empty(_SYMBOLS, np.int64), np.zeros(_SYMBOLS, np.int64)
    ored = _survey(x, mantissa_bits, counts)
    drop = 0
    if mantissa_bits == 23:
        if ored & np.uint32(0xFFFF) == 0:
            drop = 16
        elif ored & np.uint32(0x1FFF) == 0:
            drop = 13
    _code_lengths(counts, lengths)
    coded = np.int64(0)
    for s in range(_SYMBOLS):
        coded += counts[s] * lengths[s]
    kept = mantissa_bits - drop
    blocks = (n + BLOCK - 1) // BLOCK
    most = LENGTHS_NBYTES + 2 * blocks + _plane_nbytes(n, kept + 1) + coded // 8 + blocks
    out[0], out[1], out[2], out[3] = 0, 0, 0, 0
    if n == 0 or most >= raw_nbytes:
        data = x.view(np.uint8)
        for j in range(raw_nbytes):
            out[HEADER_NBYTES + j] = data[j]
        return HEADER_NBYTES + raw_nbytes
    out[0], out[1] = 1, drop
    for i in range(LENGTHS_NBYTES):
        out[HEADER_NBYTES + i] = np.uint8(lengths[2 * i] | (lengths[2 * i + 1] << 4))
    codes = np.zeros(_SYMBOLS, np.uint32)
    _canonical(lengths, codes)
    return _encode_blocks(x, mantissa_bits, kept, codes, out)


@njit(nogil=True, cache=True)
def _encode_blocks(x, mantissa_bits, kept, codes, out):
    n = x.size
    mask = np.uint32((1 << (8 * x.itemsize - 1 - mantissa_bits)) - 1)
    sizes = HEADER_NBYTES + LENGTHS_NBYTES
    planes = sizes + 2 * ((n + BLOCK - 1) // BLOCK)
    at = planes + _plane_nbytes(n, kept + 1)
    exponents, rests = np.zeros((_STREAMS, BLOCK), np.uint8), np.zeros(_TILE, np.uint32)
    flat = exponents.reshape(_TILE)
    words = np.zeros((_STREAMS, 2 * _STREAM_WORDS), np.uint32)
    streams = words.view(np.uint8)
    ends = np.zeros((_STREAMS, 3), np.uint64)
    shift, drop = np.uint32(mantissa_bits), np.uint32(mantissa_bits - kept)
    low = np.uint32((1 << kept) - 1)
    sign, top = np.uint32(8 * x.itemsize - 1), np.uint32(kept)
    for first in range(0, n, _TILE):
        m = min(_TILE, n - first)
        tile = x[first : first + m]
        for j in range(m):
            flat[j] = np.uint8((np.uint32(tile[j]) >> shift) & mask)
        if kept == 7:
            plane = out[planes + first : planes + first + m]
            for j in range(m):
                v = np.uint32(tile[j])
                plane[j] = np.uint8(((v >> drop) & np.uint32(127)) | ((v >> sign) << np.uint32(7)))
        else:
            for j in range(m):
                v = np.uint32(tile[j])
                rests[j] = ((v >> drop) & low) | ((v >> sign) << top)
            _put_planes(rests, first, m, n, kept + 1, planes, out)
        for b in range(0, (m + BLOCK - 1) // BLOCK, 2):
            here = min(BLOCK, m - b * BLOCK)
            there = max(min(BLOCK, m - (b + 1) * BLOCK), 0)
            both = min(here, there) // 2 * 2
            _put_two(
                exponents[b], exponents[b + 1], both, codes, words[b], words[b + 1], ends[b], ends[b + 1]
            )
            for row, count in ((b, here), (b + 1, there)):
                if count:
                    nbytes = _put_rest(exponents[row], both, count, codes, words[row], ends[row])
                    stream = streams[row]
                    for j in range(nbytes):
                        out[at + j] = stream[j]
                    at += nbytes
                    out[sizes], out[sizes + 1] = np.uint8(nbytes & 255), np.uint8(nbytes >> 8)
                    sizes += 2
    return at


@njit(nogil=True, cache=True, inline="always")
def _put_pair(exponents, j, codes, words, held, filled, w):
    """Two codes become one before they meet the bits held, which every step has to wait for."""
    a, b = np.uint64(codes[exponents[j]]), np.uint64(codes[exponents[j + np.uint64(1)]])
    length = a >> np.uint64(24)
    both = (a & np.uint64(0xFFFFFF)) | ((b & np.uint64(0xFFFFFF)) << length)
    held |= both << filled
    filled += length + (b >> np.uint64(24))
    words[w] = np.uint32(held & np.uint64(0xFFFFFFFF))
    full = filled >> np.uint64(5)  # under 32 + 24 bits: 0 or 1
    return held >> (full << np.uint64(5)), filled & np.uint64(31), w + full


@njit(nogil=True, cache=True)
def _put_two(first, second, m, codes, first_words, second_words, first_end, second_end):
    """Write the codes of m (even) exponents of two blocks. Ends: bits held, their number, words written."""
    h0, f0, w0 = np.uint64(0), np.uint64(0), np.uint64(0)
    h1, f1, w1 = np.uint64(0), np.uint64(0), np.uint64(0)
    for j in range(np.uint64(0), np.uint64(m), np.uint64(2)):
        h0, f0, w0 = _put_pair(first, j, codes, first_words, h0, f0, w0)
        h1, f1, w1 = _put_pair(second, j, codes, second_words, h1, f1, w1)
    first_end[0], first_end[1], first_end[2] = h0, f0, w0
    second_end[0], second_end[1], second_end[2] = h1, f1, w1


@njit(nogil=True, cache=True)
def _put_rest(exponents, done, m, codes, words, end):
    """Write the codes from exponent ``done`` (even) on; returns the bytes that the whole stream fills."""
    held, filled, w = end[0], end[1], end[2]
    for j in range(np.uint64(done), np.uint64(m // 2 * 2), np.uint64(2)):
        held, filled, w = _put_pair(exponents, j, codes, words, held, filled, w)
    if m % 2:
        last = np.uint64(codes[exponents[m - 1]])
        held |= (last & np.uint64(0xFFFFFF)) << filled
        filled += last >> np.uint64(24)
    words[w] = np.uint32(held & np.uint64(0xFFFFFFFF))
    words[w + np.uint64(1)] = np.uint32(held >> np.uint64(32))
    return 4 * np.int64(w) + (np.int64(filled) + 7) // 8


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
def check(payload, size, n, mantissa_bits, itemsize):
    """0 if decode may read the payload; else the index of what is wrong with it.

    payload: its first bytes, up to the blocks' sizes at least; size: of all of it.
    """
    if size < HEADER_NBYTES:
        return 1
    mode, drop = payload[0], payload[1]
    if (
        mode > 1
        or payload[2]
        or payload[3]
        or not (drop == 0 or (mantissa_bits == 23 and (drop == 13 or drop == 16)))
    ):
        return 3
    if mode == 0:
        return 3 if drop else 0 if size == HEADER_NBYTES + n * itemsize else 2
    blocks = (n + BLOCK - 1) // BLOCK
    at = HEADER_NBYTES + LENGTHS_NBYTES
    need = at + 2 * blocks + _plane_nbytes(n, mantissa_bits - drop + 1)
    if size < need:
        return 1
    used = 0
    for i in range(HEADER_NBYTES, at):
        pair = np.int64(payload[i])
        for length in (pair & 15, pair >> 4):
            if length > LIMIT:
                return 4
            if length:
                used += 1 << (LIMIT - length)
    if used > _TABLE:
        return 4
    for b in range(blocks):
        nbytes = np.int64(payload[at + 2 * b]) | (np.int64(payload[at + 2 * b + 1]) << 8)
        if nbytes > BLOCK * LIMIT // 8:
            return 5
        need += nbytes
    return 0 if need == size else 2


@njit(nogil=True, cache=True)
def _lookup(lengths, single, several):
    """Tables over 12 bits. single: symbol, length << 8. several: up to 4 symbols, their number << 32, bits << 40."""
    codes = np.zeros(_SYMBOLS, np.uint32)
    _canonical(lengths, codes)
    for v in range(_TABLE):
        single[v] = LIMIT << 8  # what no code begins with
    for s in range(_SYMBOLS):
        d = lengths[s]
        if d:
            for v in range(codes[s] & np.uint32(0xFFFFFF), _TABLE, 1 << d):
                single[v] = s | (d << 8)
    for v in range(_TABLE):
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
def decode(payload, out, mantissa_bits):
    """payload: uint8, one that passed :func:`check`. out: uint16 or uint32 bits."""
    n = out.size
    if payload[0] == 0:
        data = out.view(np.uint8)
        for j in range(data.size):
            data[j] = payload[HEADER_NBYTES + j]
        return
    drop = np.int64(payload[1])
    kept = mantissa_bits - drop
    lengths = np.zeros(_SYMBOLS, np.int64)
    for i in range(LENGTHS_NBYTES):
        pair = np.int64(payload[HEADER_NBYTES + i])
        lengths[2 * i], lengths[2 * i + 1] = pair & 15, pair >> 4
    single, several = np.empty(_TABLE, np.uint16), np.empty(_TABLE, np.uint64)
    _lookup(lengths, single, several)
    sizes = HEADER_NBYTES + LENGTHS_NBYTES
    planes = sizes + 2 * ((n + BLOCK - 1) // BLOCK)
    at = planes + _plane_nbytes(n, kept + 1)
    exponents, rests = np.zeros((_STREAMS, _ROW), np.uint8), np.zeros(_TILE, np.uint32)
    words = np.zeros((_STREAMS, _STREAM_WORDS), np.uint64)
    streams = words.view(np.uint8)
    shift, low = np.uint32(mantissa_bits), np.uint32((1 << kept) - 1)
    sign, top, gap = np.uint32(8 * out.itemsize - 1), np.uint32(kept), np.uint32(drop)
    for first in range(0, n, _TILE):
        m = min(_TILE, n - first)
        for row in range((m + BLOCK - 1) // BLOCK):
            nbytes = np.int64(payload[sizes]) | (np.int64(payload[sizes + 1]) << 8)
            sizes += 2
            stream = streams[row]
            for j in range(nbytes):
                stream[j] = payload[at + j]
            at += nbytes
        _exponents(words, single, several, exponents, m)
        _get_planes(payload, first, m, n, kept + 1, planes, rests)
        for row in range((m + BLOCK - 1) // BLOCK):
            start, stop = row * BLOCK, min(m, (row + 1) * BLOCK)
            block, rest, exponent = out[first + start : first + stop], rests[start:stop], exponents[row]
            for j in range(stop - start):
                block[j] = (
                    ((rest[j] >> top) << sign) | (np.uint32(exponent[j]) << shift) | ((rest[j] & low) << gap)
                )


@njit(nogil=True, cache=True, inline="always")
def _window(words, p):
    """64 bits of a stream from bit p on."""
    k, s = p >> np.uint64(6), p & np.uint64(63)
    return (words[k] >> s) | ((words[k + np.uint64(1)] << np.uint64(1)) << (np.uint64(63) - s))


@njit(nogil=True, cache=True, inline="always")
def _get_several(words, several, exponents, i, p):
    """Four lookups of up to four exponents each, from one window; returns the next exponent and bit."""
    window = _window(words, p)
    for _ in range(4):
        entry = several[window & np.uint64(_TABLE - 1)]
        exponents[i] = np.uint8(entry & np.uint64(255))
        exponents[i + np.uint64(1)] = np.uint8((entry >> np.uint64(8)) & np.uint64(255))
        exponents[i + np.uint64(2)] = np.uint8((entry >> np.uint64(16)) & np.uint64(255))
        exponents[i + np.uint64(3)] = np.uint8((entry >> np.uint64(24)) & np.uint64(255))
        i += (entry >> np.uint64(32)) & np.uint64(255)
        bits = entry >> np.uint64(40)
        window >>= bits
        p += bits
    return i, p


@njit(nogil=True, cache=True)
def _exponents(words, single, several, exponents, m):
    """Decode the m exponents of up to four blocks. At most 12 bits each: damaged streams stay inside ``words``."""
    done, bit = np.zeros(_STREAMS, np.uint64), np.zeros(_STREAMS, np.uint64)
    if m == _TILE:
        e0, e1, e2, e3 = exponents[0], exponents[1], exponents[2], exponents[3]
        s0, s1, s2, s3 = words[0], words[1], words[2], words[3]
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
        stream, into = words[row], exponents[row]
        while i + np.uint64(4 * _PER_LOOKUP) <= stop:
            i, p = _get_several(stream, several, into, i, p)
        while i < stop:
            found = np.uint64(single[_window(stream, p) & np.uint64(_TABLE - 1)])
            into[i] = np.uint8(found & np.uint64(255))
            p += found >> np.uint64(8)
            i += np.uint64(1)


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
