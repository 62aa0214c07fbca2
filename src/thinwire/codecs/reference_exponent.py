"""Plain, slow reference of ``exponent``: the format read off its definition.

The kernels must give the same bytes and the same values.

A value has a sign, an exponent of E bits (8; fp16: 5) and M mantissa bits (bf16 7, fp16 10, fp32 23). Of the
mantissa's low bits ``drop`` are left out because they are zero in all values: 16 or 13 in an fp32 message that
was bf16 or fp16 before, else 0. ``rest`` = sign and the kept mantissa bits, the sign on top: 8, 11 or 24 bits.

Payload: mode, drop, two zero bytes; mode 0: the values' bytes follow as they are. Mode 1: code lengths of the 256
exponents, four bits each; uint16 sizes of the streams of all blocks of 1024 values; the rests in byte planes (of 11
bits the low 8, then three bits a value in bit order); the streams. Mode 2: as mode 1, but with the id of a codebook
that an earlier message brought (uint16) instead of the zero bytes, and no code lengths. Code lengths and streams are
those of reference_huffman, with exponents as symbols.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .reference_huffman import (
    BLOCK,
    LENGTHS_NBYTES,
    code_lengths,
    decode_blocks,
    encode_blocks,
    pack_lengths,
    unpack_lengths,
)

HEADER_NBYTES = 4
SPARE_BELOW, SPARE_ABOVE = 8, 4
"""Exponents under and over those seen that a codebook for later messages has, too."""


def head_nbytes(numel: int) -> int:
    """Most bytes before the planes: header, code lengths, sizes of the blocks' streams."""
    return HEADER_NBYTES + LENGTHS_NBYTES + 2 * -(-numel // BLOCK)


def encode(
    words: Any, mantissa_bits: int, *, spare: bool = False, book: tuple[Any, int, int] | None = None
) -> bytes:
    """Payload of values given as uint16 or uint32 bits; empty if the codebook does not fit them.

    spare: make a codebook that later messages can use. book: code lengths, drop and id of one that is there.
    """
    total_bits = 8 * words.itemsize
    x = words.astype(np.uint64)
    exponents = (x >> mantissa_bits & (2 ** (total_bits - 1 - mantissa_bits) - 1)).astype(np.int64)
    mantissas = x & (2**mantissa_bits - 1)
    ored = int(np.bitwise_or.reduce(mantissas)) if len(x) else 0
    drop = _drop(ored, mantissa_bits) if book is None else book[1]
    kept = mantissa_bits - drop
    rests = mantissas >> drop | (x >> (total_bits - 1)) << kept
    counts = np.bincount(exponents, minlength=256)
    blocks = -(-len(x) // BLOCK)
    planes = _planes(rests, kept + 1)
    if book is not None:
        lengths, _, number = book
        if len(x) == 0 or ored % 2**drop or not lengths[exponents].all():
            return b""
        sizes, streams = encode_blocks(exponents, lengths)
        payload = bytes([2, drop, number % 256, number // 256]) + sizes + planes + streams
        return payload if len(payload) <= HEADER_NBYTES + words.nbytes else b""
    lengths = code_lengths(_widened(counts, 2 ** (total_bits - 1 - mantissa_bits)) if spare else counts)
    most = LENGTHS_NBYTES + 2 * blocks + len(planes) + int((counts * lengths).sum()) // 8 + blocks
    if len(x) == 0 or most >= words.nbytes:
        return bytes(HEADER_NBYTES) + bytes(words.tobytes())
    sizes, streams = encode_blocks(exponents, lengths)
    return bytes([1, drop, 0, 0]) + pack_lengths(lengths) + sizes + planes + streams


def _widened(counts: Any, symbols: int) -> Any:
    """The counts, with 1 for those of 0: exponents between those seen, SPARE_BELOW under, SPARE_ABOVE over, and 0."""
    seen = [s for s in range(1, 256) if counts[s]]
    lowest, highest = (seen[0], seen[-1]) if seen else (1, 0)
    wanted = [0, *range(max(lowest - SPARE_BELOW, 0), min(highest + SPARE_ABOVE, symbols - 1) + 1)]
    wide = counts.copy()
    wide[wanted] = np.maximum(wide[wanted], 1)
    return wide


def _drop(ored: int, mantissa_bits: int) -> int:
    """Low mantissa bits that are left out. ored: all mantissas of the message."""
    if mantissa_bits == 23:
        for drop in (16, 13):
            if ored % 2**drop == 0:
                return drop
    return 0


def _planes(rests: Any, width: int) -> bytes:
    low = [(rests >> shift & 255).astype(np.uint8).tobytes() for shift in range(0, width // 8 * 8, 8)]
    if width % 8:
        bits = rests[:, None] >> np.arange(8, 11, dtype=np.uint64) & np.uint64(1)
        low.append(np.packbits(bits.astype(np.uint8), bitorder="little").tobytes())
    return b"".join(low)


def decode(payload: bytes, numel: int, dtype: Any, mantissa_bits: int, lengths: Any = None) -> Any:
    """The bits (uint16 or uint32 array) of a payload that :func:`encode` made. lengths: the codebook of mode 2."""
    itemsize = np.dtype(dtype).itemsize
    if payload[0] == 0:
        return np.frombuffer(payload, dtype, numel, HEADER_NBYTES).copy()
    kept = mantissa_bits - payload[1]
    at = HEADER_NBYTES
    if payload[0] == 1:
        at += LENGTHS_NBYTES
        lengths = unpack_lengths(payload[HEADER_NBYTES:at])
    sizes = np.frombuffer(payload, "<u2", -(-numel // BLOCK), at)
    at += sizes.nbytes
    rests = np.zeros(numel, np.uint64)
    for shift in range(0, (kept + 1) // 8 * 8, 8):
        rests |= np.frombuffer(payload, np.uint8, numel, at).astype(np.uint64) << np.uint64(shift)
        at += numel
    if (kept + 1) % 8:
        nbytes = -(-3 * numel // 8)
        bits = np.unpackbits(np.frombuffer(payload, np.uint8, nbytes, at), bitorder="little")[: 3 * numel]
        rests |= (bits.reshape(numel, 3).astype(np.uint64) << np.arange(8, 11, dtype=np.uint64)).sum(
            1, np.uint64
        )
        at += nbytes
    x = rests >> np.uint64(kept) << np.uint64(8 * itemsize - 1)
    x |= decode_blocks(payload[at:], sizes, numel, lengths).astype(np.uint64) << np.uint64(mantissa_bits)
    x |= (rests & np.uint64(2**kept - 1)) << np.uint64(mantissa_bits - kept)
    return x.astype(dtype)
