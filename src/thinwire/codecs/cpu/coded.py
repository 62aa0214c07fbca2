"""Kernels of codecs with a byte coder (``int4|huffman``). ``reference_coded`` is the specification.

Bytes of codes have long codes of their own: looking up one at a time in a table that leaves room in the L1 cache is
faster than ``huffman``'s several.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,assignment,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from ..reference_huffman import BLOCK, LENGTHS_NBYTES
from .huffman import (
    STREAM_NBYTES,
    STREAMS,
    SYMBOLS,
    TABLE,
    TILE,
    canonical,
    check_lengths,
    code_lengths,
    get_lengths,
    load_streams,
    lookup_single,
    new_scratch,
    put_lengths,
    put_streams,
    streams_nbytes,
    window,
)
from .vectors import fill, lane, load, span, store


@njit(nogil=True, cache=True)
def _count(data, counts):
    """Count the bytes. Four tables: a run of one byte does not wait for itself."""
    tables = np.zeros((4, SYMBOLS), np.uint32)
    whole = data.size // 4 * 4
    for j in range(0, whole, 4):
        tables[0, data[j]] += np.uint32(1)
        tables[1, data[j + 1]] += np.uint32(1)
        tables[2, data[j + 2]] += np.uint32(1)
        tables[3, data[j + 3]] += np.uint32(1)
    for j in range(whole, data.size):
        tables[0, data[j]] += np.uint32(1)
    for s in range(SYMBOLS):
        counts[s] = np.int64(tables[0, s]) + tables[1, s] + tables[2, s] + tables[3, s]


@njit(nogil=True, cache=True)
def encode(data, parts, out):
    """Write the parts (their sizes: int64) of data to ``out``, each coded if that is smaller; returns the bytes written."""
    counts, codes = np.empty(SYMBOLS, np.int64), np.empty(SYMBOLS, np.uint32)
    rows = np.zeros((STREAMS, BLOCK), np.uint8)
    scratch = new_scratch()
    start = at = 0
    for n in parts:
        part = data[start : start + n]
        start += n
        _count(part, counts)
        lengths = np.zeros(SYMBOLS, np.int64)
        code_lengths(counts, lengths)
        coded = np.int64(0)
        for s in range(SYMBOLS):
            coded += counts[s] * lengths[s]
        blocks = (n + BLOCK - 1) // BLOCK
        if LENGTHS_NBYTES + 2 * blocks + coded // 8 + blocks >= n:
            out[at] = 0
            at += 1
            for j in range(n):
                out[at + j] = part[j]
            at += n
            continue
        out[at] = 1
        put_lengths(lengths, out, at + 1)
        codes[:] = 0
        canonical(lengths, codes)
        sizes = at + 1 + LENGTHS_NBYTES
        at = sizes + 2 * blocks
        whole = n // TILE * TILE
        for first in range(0, whole, TILE):
            tile = part[first : first + TILE].reshape(STREAMS, BLOCK)
            sizes, at = put_streams(tile, TILE, codes, scratch, out, sizes, at)
        if whole < n:
            rows.reshape(TILE)[: n - whole] = part[whole:]
            sizes, at = put_streams(rows, n - whole, codes, scratch, out, sizes, at)
    return at


@njit(nogil=True, cache=True)
def check(payload, parts):
    """0 if :func:`decode` may read the payload; else the index of what is wrong with it."""
    at = 0
    for n in parts:
        if at >= payload.size:
            return 1
        mode = payload[at]
        at += 1
        if mode > 1:
            return 2
        if mode == 0:
            at += n
            continue
        blocks = (n + BLOCK - 1) // BLOCK
        sizes = at + LENGTHS_NBYTES
        if sizes + 2 * blocks > payload.size:
            return 1
        if not check_lengths(payload, at):
            return 3
        nbytes = streams_nbytes(payload, sizes, blocks)
        if nbytes < 0:
            return 4
        at = sizes + 2 * blocks + nbytes
    return 0 if at == payload.size else 1


@njit(nogil=True, cache=True)
def decode(payload, parts, out):
    """Write the parts of a payload that passed :func:`check` to ``out`` (uint8, as long as all of them)."""
    single, streams = np.empty(TABLE, np.uint16), np.zeros((STREAMS, STREAM_NBYTES), np.uint8)
    lengths = np.empty(SYMBOLS, np.int64)
    start = at = 0
    for n in parts:
        part = out[start : start + n]
        start += n
        coded = payload[at]
        at += 1
        if not coded:
            for j in range(n):
                part[j] = payload[at + j]
            at += n
            continue
        get_lengths(payload, at, lengths)
        lookup_single(lengths, single)
        sizes = at + LENGTHS_NBYTES
        at = sizes + 2 * ((n + BLOCK - 1) // BLOCK)
        for first in range(0, n, TILE):
            m = min(TILE, n - first)
            sizes, at = load_streams(payload, sizes, at, m, streams)
            _get_bytes(streams, single, part[first : first + m])


@njit(nogil=True, cache=True)
def _get_bytes(streams, single, tile):
    """Decode up to four blocks. At most 12 bits a byte: damaged streams stay inside their rows."""
    if tile.size == TILE:
        blocks = tile.reshape(STREAMS, BLOCK)
        table = span(single)
        b0, b1, b2, b3 = span(blocks[0]), span(blocks[1]), span(blocks[2]), span(blocks[3])
        s0, s1, s2, s3 = span(streams[0]), span(streams[1]), span(streams[2]), span(streams[3])
        p0, p1, p2, p3 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
        for j in range(np.uint64(0), np.uint64(BLOCK), np.uint64(4)):
            p0 = _get_four(s0, table, b0, j, p0)
            p1 = _get_four(s1, table, b1, j, p1)
            p2 = _get_four(s2, table, b2, j, p2)
            p3 = _get_four(s3, table, b3, j, p3)
        return
    for row in range((tile.size + BLOCK - 1) // BLOCK):
        block = tile[row * BLOCK : min(tile.size, (row + 1) * BLOCK)]
        whole, p = np.uint64(block.size // 4 * 4), np.uint64(0)
        stream = span(streams[row])
        for j in range(np.uint64(0), whole, np.uint64(4)):
            p = _get_four(stream, span(single), span(block), j, p)
        for j in range(whole, np.uint64(block.size)):
            found = np.uint64(single[window(stream, p) & np.uint64(TABLE - 1)])
            block[j] = np.uint8(found & np.uint64(255))
            p += found >> np.uint64(8)


@njit(nogil=True, cache=True, forceinline=True)
def _get_four(stream, single, block, j, p):
    """Four bytes from one window; returns the next bit. All are spans."""
    ahead = window(stream, p)
    for i in range(4):
        found = np.uint64(lane(load(single, ahead & np.uint64(TABLE - 1), 1), 0))
        store(block, j + np.uint64(i), fill(np.uint8(found), 1))
        bits = found >> np.uint64(8)
        ahead >>= bits
        p += bits
    return p
