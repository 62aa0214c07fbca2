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
    SYMBOLS,
    TABLE,
    canonical,
    check_lengths,
    code_lengths,
    count,
    get_lengths,
    lookup_single,
    put_lengths,
    streams_nbytes,
)
from .huffman_streams import (
    STREAM_NBYTES,
    STREAMS,
    TILE,
    lend,
    load_streams,
    new_scratch,
    put_streams,
    window,
)
from .spans import read, span, write


@njit(nogil=True, cache=True)
def encode(data, parts, out):
    """Write the parts (their sizes: int64) of data to ``out``, each coded if that is smaller; returns the bytes written."""
    counts, codes = np.empty(SYMBOLS, np.int64), np.empty(SYMBOLS, np.uint32)
    scratch = new_scratch()
    start = at = 0
    for n in parts:
        part = data[start : start + n]
        start += n
        counts[:] = 0
        count(part, 0, 255, counts)
        lengths = np.zeros(SYMBOLS, np.int64)
        code_lengths(counts, lengths)
        coded = np.int64(0)
        for s in range(SYMBOLS):
            coded += counts[s] * lengths[s]
        blocks = (n + BLOCK - 1) // BLOCK
        if LENGTHS_NBYTES + 2 * blocks + coded // 8 + blocks >= n:
            out[at] = 0
            out[at + 1 : at + 1 + n] = part
            at += 1 + n
            continue
        out[at] = 1
        put_lengths(lengths, out, at + 1)
        codes[:] = 0
        canonical(lengths, codes)
        at = _encode_part(part, codes, scratch, out, at + 1 + LENGTHS_NBYTES)
    return at


@njit(nogil=True, cache=True)
def _encode_part(part, codes, scratch, out, sizes):
    """Write the sizes of the streams of a part from ``sizes`` on, and the streams; returns the end."""
    n, end, sizes = np.uint64(part.size), np.uint64(out.size), np.uint64(sizes)
    at = sizes + np.uint64(2 * ((part.size + BLOCK - 1) // BLOCK))
    symbols, code_of, into = span(part), span(codes), span(out)
    work = lend(scratch)
    for first in range(np.uint64(0), n, np.uint64(TILE)):
        m = min(np.uint64(TILE), n - first)
        sizes, at = put_streams(symbols, first, m, code_of, work, into, sizes, at, end)
    return np.int64(at)


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
    single, streams = np.empty(TABLE, np.uint16), np.zeros(STREAMS * STREAM_NBYTES, np.uint8)
    lengths = np.empty(SYMBOLS, np.int64)
    start = at = 0
    for n in parts:
        part = out[start : start + n]
        start += n
        coded = payload[at]
        at += 1
        if not coded:
            part[:] = payload[at : at + n]
            at += n
            continue
        get_lengths(payload, at, lengths)
        lookup_single(lengths, single)
        at = _decode_part(payload, at + LENGTHS_NBYTES, single, streams, part)


@njit(nogil=True, cache=True)
def _decode_part(payload, sizes, single, streams, part):
    """Read a part whose streams' sizes are at ``sizes``; returns the end of the streams."""
    n, sizes = np.uint64(part.size), np.uint64(sizes)
    at = sizes + np.uint64(2 * ((part.size + BLOCK - 1) // BLOCK))
    source, work, table, into = span(payload), span(streams), span(single), span(part)
    for first in range(np.uint64(0), n, np.uint64(TILE)):
        m = min(np.uint64(TILE), n - first)
        sizes, at = load_streams(source, sizes, at, m, work)
        _get_bytes(work, table, into, first, m)
    return np.int64(at)


@njit(nogil=True, cache=True)
def _get_bytes(streams, single, into, first, m):
    """Decode up to four blocks of m bytes in all. At most 12 bits a byte: damaged streams stay inside their rows.

    All arrays are spans.
    """
    row, block = np.uint64(8 * STREAM_NBYTES), np.uint64(BLOCK)
    if m == TILE:
        p0, p1, p2, p3 = np.uint64(0), row, np.uint64(2) * row, np.uint64(3) * row
        for j in range(first, first + block, np.uint64(4)):
            p0 = _get_four(streams, single, into, j, p0)
            p1 = _get_four(streams, single, into, j + block, p1)
            p2 = _get_four(streams, single, into, j + np.uint64(2) * block, p2)
            p3 = _get_four(streams, single, into, j + np.uint64(3) * block, p3)
        return
    for b in range((m + block - np.uint64(1)) // block):
        at, p, end = first + b * block, b * row, first + min((b + np.uint64(1)) * block, m)
        while at + np.uint64(4) <= end:
            p = _get_four(streams, single, into, at, p)
            at += np.uint64(4)
        while at < end:
            found = np.uint64(read(single, window(streams, p) & np.uint64(TABLE - 1), np.uint16))
            write(into, at, np.uint8(found))
            p += found >> np.uint64(8)
            at += np.uint64(1)


@njit(nogil=True, cache=True, forceinline=True)
def _get_four(streams, single, into, j, p):
    """Four bytes from one window, to j and behind; returns the next bit. All are spans."""
    ahead = window(streams, p)
    for i in range(4):
        found = np.uint64(read(single, ahead & np.uint64(TABLE - 1), np.uint16))
        write(into, j + np.uint64(i), np.uint8(found))
        bits = found >> np.uint64(8)
        ahead >>= bits
        p += bits
    return p
