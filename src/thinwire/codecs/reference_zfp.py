"""ZFP fixed rate, 1-D, step by step: slow, and the specification that the kernels are tested against.

Source: P. Lindstrom, "Fixed-Rate Compressed Floating-Point Arrays", IEEE TVCG 20(12), 2014, and the zfp 1.0
bit stream. ``docs/wire-format.md`` holds the same in prose, with the two additions made here: headers of
blocks that hold Inf or NaN, and blocks below 2^-96, where the C library loses values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

HEADER_BITS = 9
FLOAT_MAX = float(np.finfo(np.float32).max)
# Class of a value in the header of a block that is not finite.
FINITE, PLUS_INF, MINUS_INF, NAN = 0, 1, 2, 3
CLASS_VALUES = (0.0, float("inf"), float("-inf"), float("nan"))


def block_bits(rate: int) -> int:
    """Bits of one block of 4 values."""
    return max(HEADER_BITS, 4 * rate)


def payload_nbytes(numel: int, rate: int) -> int:
    """Bytes of a payload: whole 64-bit words, as the C library writes them."""
    return -(-(-(-numel // 4) * block_bits(rate)) // 64) * 8


def power_of_two(exponent: Any) -> Any:
    """2^exponent, exactly, as float64."""
    return np.ldexp(np.float64(1), exponent)


def split(x: Array) -> Array:
    """fp32 values (n,) to blocks (ceil(n/4), 4). A partial block repeats slot 0 into 1, 1 into 2, 0 into 3."""
    n = x.size
    blocks = np.zeros((-(-n // 4), 4), np.float32)
    blocks.reshape(-1)[:n] = x
    for slot, source in ((1, 0), (2, 1), (3, 0)):
        if 0 < n % 4 <= slot:
            blocks[-1, slot] = blocks[-1, source]
    return blocks


def coefficients(blocks: Array) -> tuple[Array, Array]:
    """Steps 1 to 4 of finite blocks (b, 4): their emax, int64 (b,), and negabinary coefficients, uint32 (b, 4)."""
    emax = np.maximum(np.frexp(np.abs(blocks).max(1))[1].astype(np.int64), -126)
    scaled = np.trunc(blocks.astype(np.float64) * power_of_two(30 - emax)[:, None])
    x, y, z, w = scaled.astype(np.int64).T
    x = (x + w) >> 1
    w = w - x
    z = (z + y) >> 1
    y = y - z
    x = (x + z) >> 1
    z = z - x
    w = (w + y) >> 1
    y = y - w
    w = w + (y >> 1)
    y = y - (w >> 1)
    lifted = np.stack((x, y, z, w), 1).astype(np.uint32)  # modulo 2^32
    return emax, (lifted + np.uint32(0xAAAAAAAA)) ^ np.uint32(0xAAAAAAAA)


def plane_code(n: int, plane: int) -> tuple[list[int], int]:
    """Step 5 for one bit plane (bit j = slot j) with n slots already significant: its bits and the new n."""
    code = [plane >> j & 1 for j in range(n)]
    plane >>= n
    while n < 4:
        code.append(int(plane != 0))
        if not plane:
            break
        while n < 3:
            code.append(plane & 1)
            if plane & 1:
                break
            plane >>= 1
            n += 1
        plane >>= 1
        n += 1
    return code, n


def encode(x: Array, rate: int) -> bytes:
    """The payload of fp32 values (n,)."""
    budget = block_bits(rate)
    stream: list[int] = []
    for block in split(x):
        stream += _encode_block(block, budget)
    stream += [0] * (8 * payload_nbytes(x.size, rate) - len(stream))
    return np.packbits(np.array(stream, np.uint8), bitorder="little").tobytes()


def _encode_block(block: Array, budget: int) -> list[int]:
    if not np.isfinite(block).all():
        classes = [_class_of(float(v)) for v in block]
        bits = [0] + [c >> i & 1 for c in classes for i in (0, 1)]
    elif not block.any():
        bits = []
    else:
        emax, u = coefficients(block[None])
        header = 2 * (int(emax[0]) + 127) + 1
        bits = [header >> i & 1 for i in range(HEADER_BITS)]
        n = 0
        for k in range(31, -1, -1):
            code, n = plane_code(n, sum((int(u[0, j]) >> k & 1) << j for j in range(4)))
            bits += code
    return (bits + [0] * budget)[:budget]


def _class_of(value: float) -> int:
    if value != value:
        return NAN
    return {float("inf"): PLUS_INF, float("-inf"): MINUS_INF}.get(value, FINITE)


def decode(payload: bytes, numel: int, rate: int, limit: float = FLOAT_MAX) -> Array:
    """fp32 values (numel,) of a payload. limit: finite blocks decode to at most this magnitude."""
    budget = block_bits(rate)
    stream = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little").tolist()
    blocks = [_decode_block(stream[i * budget : (i + 1) * budget], limit) for i in range(-(-numel // 4))]
    return np.array(blocks, np.float32).reshape(-1)[:numel]


def _decode_block(bits: list[int], limit: float) -> list[float]:
    header = sum(b << i for i, b in enumerate(bits[:HEADER_BITS]))
    if not header & 1:
        return [CLASS_VALUES[header >> (1 + 2 * j) & 3] for j in range(4)]
    emax = (header >> 1) - 127
    u = _decode_planes(bits[HEADER_BITS:])
    x, y, z, w = (_int32((c ^ 0xAAAAAAAA) - 0xAAAAAAAA) for c in u)
    y = _int32(y + (w >> 1))
    w = _int32(w - (y >> 1))
    y, w = _int32(y + w), _int32(w - y)  # w = 2w - (y + w)
    z, x = _int32(z + x), _int32(x - z)
    y, z = _int32(y + z), _int32(z - y)
    w, x = _int32(w + x), _int32(x - w)
    # A product with a power of two is exact in float64: the one rounding is to fp32, by whoever stores it.
    return [min(max(i * float(power_of_two(emax - 30)), -limit), limit) for i in (x, y, z, w)]


def _decode_planes(bits: list[int]) -> list[int]:
    """Negabinary coefficients of 4 slots. Where the bits end inside a run, the run ends at that slot."""
    u = [0, 0, 0, 0]
    left = iter(bits)
    n = 0
    for k in range(31, -1, -1):
        plane = [next(left, 0) for _ in range(n)]
        while n < 4 and next(left, 0):
            run = 0
            while n + run < 3 and next(left, 1) == 0:
                run += 1
            plane += [0] * run + [1]
            n += run + 1
        for j, bit in enumerate(plane):
            u[j] |= bit << k
    return u


def _int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31
