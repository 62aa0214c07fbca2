"""Plain, slow reference of ``CODEC|huffman``: the format read off its definition. The kernels must give the same bytes.

For each part of CODEC's payload (see ``Codec.payload_parts``) a byte, the mode: 0: the part's bytes follow as they are.
1: code lengths of the 256 bytes, sizes of the streams of all blocks, the streams (reference_huffman). Mode 1 is used
where it is certain to be smaller.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def encode(data: bytes, parts: Sequence[int]) -> bytes:
    """The payload of a codec, coded."""
    coded, start = b"", 0
    for n in parts:
        coded += _encode_part(data[start : start + n])
        start += n
    return coded


def _encode_part(data: bytes) -> bytes:
    symbols = np.frombuffer(data, np.uint8)
    counts = np.bincount(symbols, minlength=256)
    lengths = code_lengths(counts)
    blocks = -(-len(data) // BLOCK)
    if LENGTHS_NBYTES + 2 * blocks + int((counts * lengths).sum()) // 8 + blocks >= len(data):
        return b"\0" + data
    return b"\1" + pack_lengths(lengths) + b"".join(encode_blocks(symbols, lengths))


def decode(payload: bytes, parts: Sequence[int]) -> bytes:
    """The codec's payload, from what :func:`encode` made of it."""
    data, at = b"", 0
    for n in parts:
        mode, at = payload[at], at + 1
        if mode == 0:
            data += payload[at : at + n]
            at += n
            continue
        lengths = unpack_lengths(payload[at : at + LENGTHS_NBYTES])
        at += LENGTHS_NBYTES
        sizes = np.frombuffer(payload, "<u2", -(-n // BLOCK), at)
        at += sizes.nbytes
        data += decode_blocks(payload[at:], sizes, n, lengths).tobytes()
        at += int(sizes.sum())
    return data
