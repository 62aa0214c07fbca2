"""ZFP fixed rate, 1-D, step by step: slow, and the specification that the kernels are tested against.

Source: P. Lindstrom, "Fixed-Rate Compressed Floating-Point Arrays", IEEE TVCG 20(12), 2014, and the zfp 1.0
bit stream. ``docs/wire-format.md`` holds the same in prose, with the two additions made here: headers of
blocks that hold Inf or NaN, and tiny blocks (below 2^-96 of fp32, 2^-962 of fp64), where the C library loses values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]

# Class of a value in the header of a block that is not finite.
FINITE, PLUS_INF, MINUS_INF, NAN = 0, 1, 2, 3
CLASS_VALUES = (0.0, float("inf"), float("-inf"), float("nan"))


@dataclass(frozen=True)
class Precision:
    """What depends on the width of a value: bits of an integer (so bit planes), of a header, and the least emax."""

    bits: int
    header: int
    least: int

    @property
    def bias(self) -> int:
        """emax + bias is what the header holds, 1 or more."""
        return 1 - self.least

    @property
    def negabinary(self) -> int:
        """Every other bit, the highest one included."""
        return 2 * ((1 << self.bits) // 3)

    @property
    def unsigned(self) -> Any:
        """The integers' type without a sign."""
        return np.uint32 if self.bits == 32 else np.uint64


SINGLE, DOUBLE = Precision(32, 9, -126), Precision(64, 12, -1022)


def precision(dtype: DTypeLike) -> Precision:
    """That of float32 or float64."""
    return DOUBLE if np.dtype(dtype) == np.float64 else SINGLE


def block_bits(rate: int) -> int:
    """Bits of one block of 4 values: the header at least, at every rate from 3 on."""
    return 4 * rate


def payload_nbytes(numel: int, rate: int) -> int:
    """Bytes of a payload: whole 64-bit words, as the C library writes them."""
    return -(-(-(-numel // 4) * block_bits(rate)) // 64) * 8


def split(x: Array) -> Array:
    """Values (n,) to blocks (ceil(n/4), 4). A partial block repeats slot 0 into 1, 1 into 2, 0 into 3."""
    n = x.size
    blocks = np.zeros((-(-n // 4), 4), x.dtype)
    blocks.reshape(-1)[:n] = x
    for slot, source in ((1, 0), (2, 1), (3, 0)):
        if 0 < n % 4 <= slot:
            blocks[-1, slot] = blocks[-1, source]
    return blocks


def coefficients(blocks: Array) -> tuple[Array, Array]:
    """Steps 1 to 4 of finite blocks (b, 4): their emax, int64 (b,), and negabinary coefficients, unsigned (b, 4)."""
    p = precision(blocks.dtype)
    emax = np.maximum(np.frexp(np.abs(blocks).max(1))[1].astype(np.int64), p.least)
    scaled = np.trunc(np.ldexp(blocks.astype(np.float64), (p.bits - 2 - emax)[:, None]))
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
    lifted = np.stack((x, y, z, w), 1).astype(p.unsigned)  # modulo 2^32, 2^64
    mask = p.unsigned(p.negabinary)
    return emax, (lifted + mask) ^ mask


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
    """The payload of fp32 or fp64 values (n,)."""
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
        p = precision(block.dtype)
        emax, u = coefficients(block[None])
        header = 2 * (int(emax[0]) + p.bias) + 1
        bits = [header >> i & 1 for i in range(p.header)]
        n = 0
        for k in range(p.bits - 1, -1, -1):
            code, n = plane_code(n, sum((int(u[0, j]) >> k & 1) << j for j in range(4)))
            bits += code
    return (bits + [0] * budget)[:budget]


def _class_of(value: float) -> int:
    if value != value:
        return NAN
    return {float("inf"): PLUS_INF, float("-inf"): MINUS_INF}.get(value, FINITE)


def decode(
    payload: bytes, numel: int, rate: int, dtype: DTypeLike = np.float32, limit: float | None = None
) -> Array:
    """The values (numel,) of a payload of fp32 or fp64. limit: finite blocks decode to at most this magnitude."""
    budget = block_bits(rate)
    most = float(np.finfo(np.dtype(dtype)).max) if limit is None else limit
    stream = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little").tolist()
    parts = [stream[i * budget : (i + 1) * budget] for i in range(-(-numel // 4))]
    blocks = [_decode_block(bits, precision(dtype), most) for bits in parts]
    return np.array(blocks, dtype).reshape(-1)[:numel]


def _decode_block(bits: list[int], p: Precision, limit: float) -> list[float]:
    header = sum(b << i for i, b in enumerate(bits[: p.header]))
    if not header & 1:
        return [CLASS_VALUES[header >> (1 + 2 * j) & 3] for j in range(4)]
    emax = (header >> 1) - p.bias

    def signed(value: int) -> int:
        half = 1 << (p.bits - 1)
        return (value + half) % (2 * half) - half

    u = _decode_planes(bits[p.header :], p.bits)
    x, y, z, w = (signed((c ^ p.negabinary) - p.negabinary) for c in u)
    y = signed(y + (w >> 1))
    w = signed(w - (y >> 1))
    y, w = signed(y + w), signed(w - y)  # w = 2w - (y + w)
    z, x = signed(z + x), signed(x - z)
    y, z = signed(y + z), signed(z - y)
    w, x = signed(w + x), signed(x - w)
    # Of fp32, exact in float64: the one rounding is to fp32, by whoever stores it. Of fp64, float() rounds, and then
    # ldexp where the value is subnormal.
    values = [float(np.ldexp(float(i), emax - (p.bits - 2))) for i in (x, y, z, w)]
    return [min(max(value, -limit), limit) for value in values]


def _decode_planes(bits: list[int], planes: int) -> list[int]:
    """Negabinary coefficients of 4 slots. Where the bits end inside a run, the run ends at that slot."""
    u = [0, 0, 0, 0]
    left = iter(bits)
    n = 0
    for k in range(planes - 1, -1, -1):
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
