"""Plain, slow reference of the Huffman codes that codecs share: canonical ones over bytes, of at most 12 bits.

A table has the code lengths of the 256 symbols, four bits each, the lower symbol in the low half of a byte. Symbols are
coded in blocks of 1024 (the last may be shorter), each in a stream of its own: the codes, bits from the lowest up,
padded with zeros to a byte.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

LENGTHS_NBYTES = 128
BLOCK = 1024
LIMIT = 12
"""Longest code in bits: a decoder looks that many up at once."""


def code_lengths(counts: Any) -> Any:
    """Code length of each of 256 symbols, 0 for those that do not occur.

    Huffman's algorithm; where two weights are equal, a symbol comes before a subtree, a lower symbol before a
    higher, an older subtree before a younger. Only the number of codes of each length is taken from it: lengths
    over LIMIT become LIMIT, then, until the code fits, the deepest shorter code gives its place to two one
    bit longer. The rarest symbols get the longest codes (of equally frequent ones the lowest).
    """
    lengths = np.zeros(256, np.int64)
    order = sorted((int(c), s) for s, c in enumerate(counts) if c)
    if len(order) == 1:
        lengths[order[0][1]] = 1
    if len(order) < 2:
        return lengths
    heap: list[Any] = [(c, 0, s, [s]) for c, s in order]
    depth = dict.fromkeys((s for _, s in order), 0)
    age = 0
    while len(heap) > 1:
        a, b = heapq.heappop(heap), heapq.heappop(heap)
        for s in a[3] + b[3]:
            depth[s] += 1
        age += 1
        heapq.heappush(heap, (a[0] + b[0], 1, age, a[3] + b[3]))
    number = np.bincount([min(d, LIMIT) for d in depth.values()], minlength=LIMIT + 1)
    while sum(int(number[d]) << (LIMIT - d) for d in range(1, LIMIT + 1)) > 1 << LIMIT:
        number[LIMIT] -= 1
        deepest = max(d for d in range(1, LIMIT) if number[d])
        number[deepest] -= 1
        number[deepest + 1] += 2
    ladder = [d for d in range(LIMIT, 0, -1) for _ in range(number[d])]
    for (_, s), d in zip(order, ladder, strict=True):
        lengths[s] = d
    return lengths


def canonical(lengths: Any) -> dict[int, str]:
    """Symbol -> its code, first bit first: codes count up in the order of (length, symbol)."""
    codes, code = {}, 0
    for d in range(1, LIMIT + 1):
        for s in range(256):
            if lengths[s] == d:
                codes[s] = format(code, f"0{d}b")
                code += 1
        code <<= 1
    return codes


def pack_lengths(lengths: Any) -> bytes:
    """The table of code lengths."""
    return bytes(int(a | b << 4) for a, b in zip(lengths[::2], lengths[1::2], strict=True))


def unpack_lengths(table: bytes) -> Any:
    """The code length of each symbol."""
    pairs = np.frombuffer(table, np.uint8)
    return np.stack([pairs & 15, pairs >> 4], 1).reshape(-1)


def encode_blocks(symbols: Any, lengths: Any) -> tuple[bytes, bytes]:
    """Sizes of the streams of all blocks as uint16, and the streams."""
    codes = canonical(lengths)
    streams = []
    for start in range(0, len(symbols), BLOCK):
        text = "".join(codes[s] for s in symbols[start : start + BLOCK])
        streams.append(np.packbits(np.array(list(text), np.uint8), bitorder="little").tobytes())
    return np.array([len(s) for s in streams], "<u2").tobytes(), b"".join(streams)


def decode_blocks(streams: bytes, sizes: Any, numel: int, lengths: Any) -> Any:
    """The symbols (uint8) of streams of these sizes."""
    meaning = {code: s for s, code in canonical(lengths).items()}
    symbols, at = [], 0
    for b, nbytes in enumerate(sizes):
        bits = np.unpackbits(np.frombuffer(streams, np.uint8, nbytes, at), bitorder="little")
        at += int(nbytes)
        code, wanted = "", min(BLOCK, numel - b * BLOCK)
        for bit in bits:
            code += str(bit)
            if code in meaning and wanted:
                symbols.append(meaning[code])
                code, wanted = "", wanted - 1
    return np.array(symbols, np.uint8)
