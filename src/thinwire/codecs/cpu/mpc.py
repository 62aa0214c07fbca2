"""MPC kernels. ``reference_mpc`` is the specification.

The 32 bit matrices of a segment are transposed side by side: rows[i * GROUP + g] is word i of group g, so that every
step of the butterfly is one vector operation over the groups.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ..reference_mpc import GROUP, HEADER_WORDS, SEGMENT

W = np.uint32


@njit(inline="always")
def _exchange(upper, lower, distance, mask):  # type: ignore[no-untyped-def]
    """The butterfly: the bits of `upper` above `mask` change places with those of `lower` in `mask`."""
    t = W(W(W(upper >> W(distance)) ^ lower) & W(mask))
    return W(upper ^ W(t << W(distance))), W(lower ^ t)


@njit(nogil=True)
def _transpose(rows):  # type: ignore[no-untyped-def]
    """rows, uint32 (1024,), row i at 32 i: each column, as 32 words, becomes its transposed bit matrix, in place.

    Butterflies at distances 16, 8 and 4 on 8 rows held at once, then at 2 and 1 on 4.
    """
    for i in range(4):
        for g in range(i * GROUP, (i + 1) * GROUP):
            a, b, c, d = rows[g], rows[g + 128], rows[g + 256], rows[g + 384]
            e, f, h, k = rows[g + 512], rows[g + 640], rows[g + 768], rows[g + 896]
            a, e = _exchange(a, e, 16, 0x0000FFFF)
            b, f = _exchange(b, f, 16, 0x0000FFFF)
            c, h = _exchange(c, h, 16, 0x0000FFFF)
            d, k = _exchange(d, k, 16, 0x0000FFFF)
            a, c = _exchange(a, c, 8, 0x00FF00FF)
            b, d = _exchange(b, d, 8, 0x00FF00FF)
            e, h = _exchange(e, h, 8, 0x00FF00FF)
            f, k = _exchange(f, k, 8, 0x00FF00FF)
            a, b = _exchange(a, b, 4, 0x0F0F0F0F)
            c, d = _exchange(c, d, 4, 0x0F0F0F0F)
            e, f = _exchange(e, f, 4, 0x0F0F0F0F)
            h, k = _exchange(h, k, 4, 0x0F0F0F0F)
            rows[g], rows[g + 128], rows[g + 256], rows[g + 384] = a, b, c, d
            rows[g + 512], rows[g + 640], rows[g + 768], rows[g + 896] = e, f, h, k
    for i in range(8):
        for g in range(i * 4 * GROUP, (i * 4 + 1) * GROUP):
            a, b, c, d = rows[g], rows[g + 32], rows[g + 64], rows[g + 96]
            a, c = _exchange(a, c, 2, 0x33333333)
            b, d = _exchange(b, d, 2, 0x33333333)
            a, b = _exchange(a, b, 1, 0x55555555)
            c, d = _exchange(c, d, 1, 0x55555555)
            rows[g], rows[g + 32], rows[g + 64], rows[g + 96] = a, b, c, d


@njit(nogil=True, cache=True)
def encode(words, dim, out):  # type: ignore[no-untyped-def]
    """words: uint32 (n,). out: uint32, max_words(n). Returns the words written."""
    n = words.size
    bitmap = HEADER_WORDS
    at = first = HEADER_WORDS + (n + GROUP - 1) // GROUP
    step1 = np.empty(SEGMENT, np.uint32)
    rows = np.zeros(SEGMENT, np.uint32)
    for start in range(0, n, SEGMENT):
        count = min(SEGMENT, n - start)
        segment = words[start : start + count]
        for i in range(min(dim, count)):
            step1[i] = segment[i]
        for i in range(dim, count):
            step1[i] = segment[i] - segment[i - dim]
        groups = count // GROUP
        for g in range(groups):
            for i in range(GROUP):
                rows[i * GROUP + g] = step1[g * GROUP + i]
        _transpose(rows)
        previous = W(0)
        for g in range(groups):
            bits = W(0)
            for l in range(GROUP):
                word = rows[l * GROUP + g]
                difference = W(word - previous)
                previous = word
                # Written always, kept if nonzero: there is room, since at most as many were kept as were seen.
                out[at] = difference
                present = W(difference != W(0))
                at += present
                bits |= W(present << W(l))
            out[bitmap] = bits
            bitmap += 1
        if count % GROUP:
            bits = W(0)
            for i in range(groups * GROUP, count):
                out[at] = step1[i]
                present = W(step1[i] != W(0))
                at += present
                bits |= W(present << W(i % GROUP))
            out[bitmap] = bits
            bitmap += 1
    out[0] = W(n)
    out[1] = W(at - first)
    return at


@njit(nogil=True, cache=True)
def check(payload, n):  # type: ignore[no-untyped-def]
    """The nonzero words that the bitmaps of n words announce, or -1 if a bit stands for a word beyond n.

    payload: uint32, at least the header and the bitmaps.
    """
    groups = (n + GROUP - 1) // GROUP
    total = np.int64(0)
    for g in range(groups):
        bits = payload[HEADER_WORDS + g]
        pairs = W(bits - (bits >> W(1) & W(0x55555555)))
        fours = W((pairs & W(0x33333333)) + (pairs >> W(2) & W(0x33333333)))
        eights = W(W(fours + (fours >> W(4))) & W(0x0F0F0F0F))
        total += np.int64(W(eights * W(0x01010101)) >> W(24))
    if n % GROUP and payload[HEADER_WORDS + groups - 1] >> W(n % GROUP):
        return -1
    return total


@njit(nogil=True, cache=True)
def decode(payload, dim, out):  # type: ignore[no-untyped-def]
    """payload: uint32, one that passed :func:`check`, as long as it announces. out: uint32 (n,)."""
    n = out.size
    at = HEADER_WORDS + (n + GROUP - 1) // GROUP
    end = payload.size
    rows = np.zeros(SEGMENT, np.uint32)
    for start in range(0, n, SEGMENT):
        count = min(SEGMENT, n - start)
        groups = count // GROUP
        bitmap = HEADER_WORDS + start // GROUP
        word = W(0)
        for g in range(groups):
            bits = payload[bitmap + g]
            for l in range(GROUP):
                present = W(bits >> W(l)) & W(1)
                # Past the last word of the payload nothing is present; the index only has to exist.
                word = W(word + payload[min(at, end - 1)] * present)
                at += present
                rows[l * GROUP + g] = word
        _transpose(rows)
        segment = out[start : start + count]
        for g in range(groups):
            for i in range(GROUP):
                segment[g * GROUP + i] = rows[i * GROUP + g]
        if count % GROUP:
            bits = payload[bitmap + groups]
            for i in range(groups * GROUP, count):
                present = bits >> W(i % GROUP) & W(1)
                segment[i] = payload[min(at, end - 1)] * present
                at += present
        if dim == 1:  # a sum in a register, not one that is read back from memory for each word
            total = W(0)
            for i in range(count):
                total = W(total + segment[i])
                segment[i] = total
        else:
            for i in range(dim, count):
                segment[i] += segment[i - dim]
