"""Canonical Huffman codes of at most 12 bits over bytes. ``reference_huffman`` is the specification.

What writes and reads the bits is in ``huffman_streams``.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-untyped,assignment"

from __future__ import annotations

import numpy as np
from numba import njit

from ..reference_huffman import BLOCK, LENGTHS_NBYTES, LIMIT

SYMBOLS = 256
TABLE = 1 << LIMIT


@njit(nogil=True, cache=True)
def count(x, shift, mask, counts):
    """Add the symbols (x >> shift) & mask to the counts (int64, 256).

    Four tables: a run of one symbol does not wait for itself.
    """
    tables = np.zeros((4, SYMBOLS), np.uint32)
    down, low = np.uint32(shift), np.uint32(mask)
    whole = x.size // 4 * 4
    for j in range(0, whole, 4):
        for k in range(4):
            tables[k, (np.uint32(x[j + k]) >> down) & low] += np.uint32(1)
    for j in range(whole, x.size):
        tables[0, (np.uint32(x[j]) >> down) & low] += np.uint32(1)
    for s in range(SYMBOLS):
        counts[s] += np.int64(tables[0, s]) + tables[1, s] + tables[2, s] + tables[3, s]


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
    following = np.zeros(LIMIT + 2, np.int64)
    for length in lengths:
        if length:
            following[length + 1] += 1
    for d in range(1, LIMIT + 1):  # from how many codes there are of a length to the first of the next
        following[d + 1] = (following[d] + following[d + 1]) << 1
    for s in range(SYMBOLS):
        d = lengths[s]
        if d:
            turned, code = 0, following[d]
            for i in range(d):
                turned |= ((code >> i) & 1) << (d - 1 - i)
            codes[s] = np.uint32(turned | (d << 24))
            following[d] += 1


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
def lookup_single(lengths, single):
    """A table over 12 bits: symbol, length << 8. single: of any integers of 16 bits or more."""
    codes = np.zeros(SYMBOLS, np.uint32)
    canonical(lengths, codes)
    single[:] = LIMIT << 8  # what no code begins with
    for s in range(SYMBOLS):
        d = lengths[s]
        if d:
            for v in range(codes[s] & np.uint32(0xFFFFFF), TABLE, 1 << d):
                single[v] = s | (d << 8)
