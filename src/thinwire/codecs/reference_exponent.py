"""Plain, slow reference of ``exponent``: the format read off its definition.

The kernels must give the same bytes and the same values.

A value has a sign, an exponent of E bits (8; fp16: 5) and M mantissa bits (bf16 7, fp16 10, fp32 23). Of the
mantissa's low bits ``drop`` are left out because they are zero in all values: 16 or 13 in an fp32 message that
was bf16 or fp16 before, else 0. ``rest`` = sign and the kept mantissa bits, the sign on top: 8, 11 or 24 bits.

Payload: mode, drop, two zero bytes; mode 0: the values' bytes follow as they are. Mode 1: code lengths of the 256
exponents, four bits each; uint16 sizes of the streams of all blocks of 1024 values; the rests in byte planes (of 11
bits the low 8, then three bits a value in bit order); the streams. A stream holds the codes of a block's exponents,
bits from the lowest up, padded with zeros to a byte.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

HEADER_NBYTES = 4
LENGTHS_NBYTES = 128
BLOCK = 1024
LIMIT = 12
"""Longest code in bits: a decoder looks that many up at once."""


def head_nbytes(numel: int) -> int:
    """Bytes before the planes: header, code lengths, sizes of the blocks' streams."""
    return HEADER_NBYTES + LENGTHS_NBYTES + 2 * -(-numel // BLOCK)


def encode(words: Any, mantissa_bits: int) -> bytes:
    """Payload of values given as uint16 or uint32 bits."""
    total_bits = 8 * words.itemsize
    x = words.astype(np.uint64)
    exponents = (x >> mantissa_bits & (2 ** (total_bits - 1 - mantissa_bits) - 1)).astype(np.int64)
    mantissas = x & (2**mantissa_bits - 1)
    drop = _drop(int(np.bitwise_or.reduce(mantissas)) if len(x) else 0, mantissa_bits)
    kept = mantissa_bits - drop
    rests = mantissas >> drop | (x >> (total_bits - 1)) << kept
    counts = np.bincount(exponents, minlength=256)
    lengths = code_lengths(counts)
    blocks = -(-len(x) // BLOCK)
    planes = _planes(rests, kept + 1)
    most = LENGTHS_NBYTES + 2 * blocks + len(planes) + int((counts * lengths).sum()) // 8 + blocks
    if len(x) == 0 or most >= words.nbytes:
        return bytes(HEADER_NBYTES) + bytes(words.tobytes())
    codes = canonical(lengths)
    streams = []
    for start in range(0, len(x), BLOCK):
        text = "".join(codes[e] for e in exponents[start : start + BLOCK])
        streams.append(np.packbits(np.array(list(text), np.uint8), bitorder="little").tobytes())
    table = bytes(int(a | b << 4) for a, b in zip(lengths[::2], lengths[1::2], strict=True))
    sizes = np.array([len(s) for s in streams], "<u2").tobytes()
    return bytes([1, drop, 0, 0]) + table + sizes + planes + b"".join(streams)


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


def decode(payload: bytes, numel: int, dtype: Any, mantissa_bits: int) -> Any:
    """The bits (uint16 or uint32 array) of a payload that :func:`encode` made."""
    itemsize = np.dtype(dtype).itemsize
    if payload[0] == 0:
        return np.frombuffer(payload, dtype, numel, HEADER_NBYTES).copy()
    kept = mantissa_bits - payload[1]
    table = np.frombuffer(payload, np.uint8, LENGTHS_NBYTES, HEADER_NBYTES)
    lengths = np.stack([table & 15, table >> 4], 1).reshape(-1)
    symbols = {code: s for s, code in canonical(lengths).items()}
    blocks = -(-numel // BLOCK)
    at = HEADER_NBYTES + LENGTHS_NBYTES
    sizes = np.frombuffer(payload, "<u2", blocks, at)
    at += 2 * blocks
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
    exponents = []
    for b in range(blocks):
        bits = np.unpackbits(np.frombuffer(payload, np.uint8, sizes[b], at), bitorder="little")
        at += int(sizes[b])
        code, wanted = "", min(BLOCK, numel - b * BLOCK)
        for bit in bits:
            code += str(bit)
            if code in symbols and wanted:
                exponents.append(symbols[code])
                code, wanted = "", wanted - 1
    x = rests >> np.uint64(kept) << np.uint64(8 * itemsize - 1)
    x |= np.array(exponents, np.uint64) << np.uint64(mantissa_bits)
    x |= (rests & np.uint64(2**kept - 1)) << np.uint64(mantissa_bits - kept)
    return x.astype(dtype)
