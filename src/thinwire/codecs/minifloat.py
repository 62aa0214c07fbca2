"""Floats of 4 and 8 bits: what their codes mean. Sign, exponent, mantissa; subnormals; no infinities are sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Minifloat:
    """A format. ``top`` is the code (without sign) of its largest finite value; codes above are NaN."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    top: int

    @property
    def width(self) -> int:
        """Bits of a code, its sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def quantum(self) -> float:
        """The smallest positive value, and the step of the subnormals."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def largest(self) -> float:
        return self.value(self.top)

    def value(self, code: int) -> float:
        """The value of a code without sign, up to ``top``."""
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        whole = mantissa + ((1 << self.mantissa_bits) if exponent else 0)
        return whole * self.quantum * 2.0 ** max(exponent - 1, 0)


E4M3 = Minifloat(4, 3, 7, 0x7E)  # largest 448 (OCP 8-bit floating point, E4M3)
E5M2 = Minifloat(5, 2, 15, 0x7B)  # largest 57344
E2M1 = Minifloat(2, 1, 1, 7)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP microscaling formats)
E3M0 = Minifloat(3, 0, 3, 7)  # 0 and the powers of two from 0.25 to 16 (arXiv 2501.18512)
