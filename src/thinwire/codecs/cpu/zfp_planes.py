"""Step 5 of ZFP: four coefficients to bit planes, bit planes to the bits of a block, and back.

A plane has 4 bits, bit j of slot j. The 32 planes of a block are two words of 16 nibbles, the plane coded first
in the lowest: `upper` has planes 31 to 16, `lower` 15 to 0. Planes of zeros at the head are counted, planes with
fewer than four significant slots go through a table, and once all four are significant planes are the stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from ..reference_zfp import plane_code

U = np.uint64
HEADER = U(9)


def _encode_table() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """[n * 256 + two planes] -> code | length << 16 | new n << 24, for n significant slots."""
    table = np.zeros(5 * 256, np.uint64)
    for n in range(5):
        for planes in range(256):
            first, middle = plane_code(n, planes & 15)
            second, after = plane_code(middle, planes >> 4)
            code = sum(bit << i for i, bit in enumerate(first + second))
            table[n * 256 + planes] = code | len(first + second) << 16 | after << 24
    return table


def _decode_plane(n: int, bits: int, left: int) -> tuple[int, int, int]:
    """The plane at the head of `left` bits, the bits it takes and the new n; a run that is cut ends there."""
    taken = min(n, left)
    plane = bits & ((1 << taken) - 1)
    while n < 4 and taken < left:
        taken += 1
        if not bits >> (taken - 1) & 1:
            break
        while n < 3 and taken < left:
            taken += 1
            if bits >> (taken - 1) & 1:
                break
            n += 1
        plane |= 1 << n
        n += 1
    return plane, taken, n


def _last_table() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """[(left * 4 + n) * 128 + next 7 bits] -> one plane | bits taken << 8 | new n << 16; left: up to 7 bits."""
    table = np.zeros(8 * 4 * 128, np.uint64)
    for i in range(table.size):
        plane, taken, n = _decode_plane(i >> 7 & 3, i & 127, i >> 9)
        table[i] = plane | taken << 8 | n << 16
    return table


def _decode_table() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """[n * 256 + next 8 bits] -> the planes that are complete | bits taken << 32 | 4 planes << 40 | new n << 48."""
    table = np.zeros(5 * 256, np.uint64)
    for i in range(table.size):
        n, at, shift, planes = i >> 8, 0, 0, 0
        while True:
            # If the plane were cut, another bit would change what it takes.
            bits, left = (i & 255) >> at, 8 - at
            plane, taken, after = _decode_plane(n, bits, left)
            if any(_decode_plane(n, bits | more << left, left + 7)[1] > taken for more in (0, 127)):
                break
            planes |= plane << shift
            n, at, shift = after, at + taken, shift + 4
        table[i] = planes | at << 32 | shift << 40 | n << 48
    return table


ENCODE = _encode_table()
DECODE = _decode_table()
LAST = _last_table()

_intrinsic: Any = intrinsic  # its stub has the call typed as the definition, with the context


@_intrinsic
def trailing_zeros(typingctx: Any, value: Any) -> Any:
    """Zero bits below the lowest one of a uint64; 64 for 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], context.get_constant(types.boolean, 0))

    return types.uint64(types.uint64), codegen


@_intrinsic
def _byte_swap(typingctx: Any, value: Any) -> Any:
    """The 8 bytes of a uint64 in reverse order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bswap(args[0])

    return types.uint64(types.uint64), codegen


@njit(inline="always")
def _swap(x, shift, mask):  # type: ignore[no-untyped-def]
    t = ((x >> shift) ^ x) & mask
    return x ^ t ^ (t << shift)


@njit(inline="always")
def _reverse_nibbles(x):  # type: ignore[no-untyped-def]
    x = _byte_swap(x)
    return ((x >> U(4)) & U(0x0F0F0F0F0F0F0F0F)) | ((x & U(0x0F0F0F0F0F0F0F0F)) << U(4))


# The bit at 16 j + k of four packed half coefficients goes to 4 k + j: each delta swap exchanges two bits of
# the six-bit position. Reversed, the plane of the highest k is the lowest nibble, the first in the stream.


@njit(inline="always")
def planes_of(x):  # type: ignore[no-untyped-def]
    x = _swap(x, U(24), U(0x00000000FF00FF00))
    x = _swap(x, U(6), U(0x00CC00CC00CC00CC))
    x = _swap(x, U(12), U(0x0000F0F00000F0F0))
    x = _swap(x, U(3), U(0x0A0A0A0A0A0A0A0A))
    return _reverse_nibbles(x)


@njit(inline="always")
def coefficients_of(x):  # type: ignore[no-untyped-def]
    x = _reverse_nibbles(x)
    x = _swap(x, U(3), U(0x0A0A0A0A0A0A0A0A))
    x = _swap(x, U(12), U(0x0000F0F00000F0F0))
    x = _swap(x, U(6), U(0x00CC00CC00CC00CC))
    return _swap(x, U(24), U(0x00000000FF00FF00))


@njit(inline="always")
def _left(high, low, shift):  # type: ignore[no-untyped-def]
    """A 128-bit shift by 0 to 127; a shift of a word by 64 is undefined, so it is done in two."""
    if shift >= U(64):
        return low << (shift - U(64)), U(0)
    return (high << shift) | ((low >> U(1)) >> (U(63) - shift)), low << shift


@njit(inline="always")
def block_of(upper, lower, exponent):  # type: ignore[no-untyped-def]
    """The bits of a finite block: (high, low). Planes of zeros at the end are zero bits: they need no code."""
    zeros = trailing_zeros(upper) >> U(2)
    planes_low = upper >> (U(4) * (zeros & U(15)))
    planes_high = lower
    if zeros < U(16):
        planes_low |= (lower << U(1)) << (U(63) - U(4) * zeros)
        planes_high = lower >> (U(4) * zeros)
    else:
        more = trailing_zeros(lower) >> U(2) & U(15)
        zeros = U(16) + more
        planes_low, planes_high = lower >> (U(4) * more), U(0)
    # Four planes at once: at most 9 + 31 + 12 + 8 bits, all of them in the low word.
    entry = ENCODE[planes_low & U(255)]
    position = HEADER + zeros
    low = U(2) * exponent + U(3) | (entry & U(0xFFFF)) << position
    position += entry >> U(16) & U(255)
    entry = ENCODE[U(256) * (entry >> U(24)) + (planes_low >> U(8) & U(255))]
    low |= (entry & U(0xFFFF)) << position
    position += entry >> U(16) & U(255)
    significant = entry >> U(24)
    planes_low = planes_low >> U(16) | planes_high << U(48)
    planes_high >>= U(16)
    high = U(0)
    while significant < U(4) and planes_low | planes_high and position < U(128):
        entry = ENCODE[U(256) * significant + (planes_low & U(255))]
        planes_low = planes_low >> U(8) | planes_high << U(56)
        planes_high >>= U(8)
        code_high, code_low = _left(U(0), entry & U(0xFFFF), position)
        high, low = high | code_high, low | code_low
        position += entry >> U(16) & U(255)
        significant = entry >> U(24)
    if position < U(128):
        planes_high, planes_low = _left(planes_high, planes_low, position)
        high, low = high | planes_high, low | planes_low
    return high, low


@njit(inline="always")
def parse(high, low, left):  # type: ignore[no-untyped-def]
    """Step 5 undone, of the `left` bits that follow a header: planes 31..16 and planes 15..0."""
    zeros = min(min(trailing_zeros(low), left), U(32))
    low = low >> zeros | (high << U(1)) << (U(63) - zeros)
    high >>= zeros
    left -= zeros
    position, significant = U(4) * zeros, U(0)
    upper, lower = U(0), U(0)
    if left >= U(16) and position <= U(32):
        # Nearly always, and without a branch to guess. The first plane is not zero, so a step of 8 bits has 4
        # planes at most, and position stays below 64.
        for _ in range(2):
            entry = DECODE[U(256) * significant + (low & U(255))]
            taken = entry >> U(32) & U(255)
            planes = entry & U(0xFFFFFFFF)
            upper |= planes << position
            lower |= (planes >> U(1)) >> (U(63) - position)
            low = low >> taken | (high << U(1)) << (U(63) - taken)
            high >>= taken
            left -= taken
            significant = entry >> U(48)
            position += entry >> U(40) & U(255)
    while significant < U(4) and left >= U(8) and position < U(128):
        entry = DECODE[U(256) * significant + (low & U(255))]
        taken = entry >> U(32) & U(255)
        planes_high, planes_low = _left(U(0), entry & U(0xFFFFFFFF), position)
        upper, lower = upper | planes_low, lower | planes_high
        low = low >> taken | (high << U(1)) << (U(63) - taken)
        high >>= taken
        left -= taken
        significant = entry >> U(48)
        position += entry >> U(40) & U(255)
    while significant < U(4) and position < U(128) and left > U(0):
        entry = LAST[(U(4) * min(left, U(7)) + significant) * U(128) + (low & U(127))]
        taken = entry >> U(8) & U(255)
        planes_high, planes_low = _left(U(0), entry & U(255), position)
        upper, lower = upper | planes_low, lower | planes_high
        low = low >> taken | (high << U(1)) << (U(63) - taken)
        high >>= taken
        left -= taken
        significant = entry >> U(16)
        position += U(4)
    if significant == U(4) and position < U(128):
        high, low = _left(high, low, position)
        upper, lower = upper | low, lower | high
    return upper, lower
