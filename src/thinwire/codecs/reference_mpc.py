"""MPC, step by step: slow, and the specification that the kernels are tested against.

Source: A. Yang, H. Mukka, F. Hesaaraki, M. Burtscher, "MPC: A Massively Parallel Compression Algorithm for
Scientific Data", IEEE CLUSTER 2015. Words are uint32 and arithmetic is modulo 2^32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

SEGMENT = 1024
GROUP = 32
HEADER_WORDS = 2


def max_words(n: int) -> int:
    """Words of a payload of n words, at most: the header, a bitmap bit and the word itself for each."""
    return HEADER_WORDS + -(-n // GROUP) + n


def transpose(group: Words) -> Words:
    """(32,) words to (32,): bit i of output word l is bit l of input word i. Its own inverse."""
    bits: NDArray[Any] = group[:, None] >> np.arange(GROUP, dtype=np.uint32) & np.uint32(1)
    return _pack(bits.T)


def _pack(bits: NDArray[Any]) -> Words:
    """(k, 32) bits to (k,) words, bit 0 first."""
    words: Words = (bits.astype(np.uint64) << np.arange(GROUP, dtype=np.uint64)).sum(1).astype(np.uint32)
    return words


def residuals(segment: Words, dim: int) -> Words:
    """Steps 1 to 3 of one segment of at most 1024 words, to as many words."""
    step1 = segment.copy()
    step1[dim:] -= segment[:-dim]
    whole = segment.size - segment.size % GROUP
    step2 = [transpose(step1[i : i + GROUP]) for i in range(0, whole, GROUP)]
    step3 = np.concatenate([*step2, np.zeros(0, np.uint32)])
    step3[1:] -= step3[:-1].copy()
    return np.concatenate([step3, step1[whole:]])  # the last, partial group stays as step 1 left it


def restore(step3: Words, dim: int) -> Words:
    """The segment that :func:`residuals` was given."""
    whole = step3.size - step3.size % GROUP
    step2 = np.cumsum(step3[:whole], dtype=np.uint32)
    step1 = [transpose(step2[i : i + GROUP]) for i in range(0, whole, GROUP)]
    segment = np.concatenate([*step1, step3[whole:]])
    for i in range(dim, segment.size):
        segment[i] = (int(segment[i]) + int(segment[i - dim])) % 2**32
    return segment


def encode(words: Words, dim: int) -> Words:
    """The payload, as words, of words (n,)."""
    n = words.size
    segments = [residuals(words[i : i + SEGMENT], dim) for i in range(0, n, SEGMENT)]
    coded = np.concatenate([*segments, np.zeros(0, np.uint32)])
    present = np.zeros((-(-n // GROUP), GROUP), bool)
    present.reshape(-1)[:n] = coded != 0
    header = np.array([n, np.count_nonzero(coded)], np.uint32)
    return np.concatenate([header, _pack(present), coded[coded != 0]])


def decode(payload: Words, dim: int) -> Words:
    """The words of a valid payload."""
    n = int(payload[0])
    groups = -(-n // GROUP)
    bitmaps = payload[HEADER_WORDS : HEADER_WORDS + groups]
    present = (bitmaps[:, None] >> np.arange(GROUP, dtype=np.uint32) & np.uint32(1)).reshape(-1)[:n] != 0
    coded = np.zeros(n, np.uint32)
    coded[present] = payload[HEADER_WORDS + groups :]
    segments = [restore(coded[i : i + SEGMENT], dim) for i in range(0, n, SEGMENT)]
    return np.concatenate([*segments, np.zeros(0, np.uint32)])
