"""Transforms before a codec: ``hadamard|int4``. The payload is that codec's. (What codes its bytes: coded.py.)

A transform maps fp32 values to as many fp32 values; 16-bit messages are widened first and rounded at the end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from .base import FLOAT_DTYPES, Codec, CompiledCodec, full_spec
from .cast import convert
from .cpu import hadamard as kernels
from .cpu.values import INF
from .kernel import with_rounding


class Transform(ABC):
    """A stage before the codec. Subclasses are frozen dataclasses, as codecs are."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def granule(self) -> int:
        """Values that are transformed together."""

    @abstractmethod
    def forward(self, values: Tensor) -> None:
        """Transform flat fp32 values in place."""

    @abstractmethod
    def inverse(self, values: Tensor) -> None:
        """Undo it, in place. Finite values stay finite."""

    @abstractmethod
    def error_bound(self, bound: Tensor, values: Tensor) -> Tensor:
        """Bound of each value's error (float64) from that of the transformed ones; ``values``: those, exactly enough."""

    def __str__(self) -> str:
        return full_spec(self)


@dataclass(frozen=True)
class Hadamard(Transform):
    """Walsh-Hadamard transform of each ``block`` values (a power of two, 32 to 4096); the last numel mod block stay.

    Spreads a large value over its block, so that integers of few bits fit the block better. Encoding divides by the
    block's length, an exact power of two; decoding does not, so nothing overflows.
    """

    block: int = 128

    name: ClassVar[str] = "hadamard"

    def __post_init__(self) -> None:
        if not 32 <= self.block <= 4096 or self.block & (self.block - 1):
            raise SpecError(f"hadamard: block must be a power of two from 32 to 4096, found {self.block}")

    @property
    def granule(self) -> int:
        return self.block

    def forward(self, values: Tensor) -> None:
        kernels.transform(self._whole(values).numpy(), np.uint64(self.block), np.float32(1 / self.block))

    def inverse(self, values: Tensor) -> None:
        whole = self._whole(values)
        most = kernels.transform(whole.numpy(), np.uint64(self.block), np.float32(1))
        if most >= INF:
            largest = torch.finfo(torch.float32).max
            blocks = whole.view(-1, self.block)
            # A sum beyond fp32 is not a sign of NaN or Inf in the message: those leave no finite value in a block.
            finite = ~torch.isnan(blocks).any(1, keepdim=True)
            blocks.copy_(torch.where(finite, blocks.clamp(-largest, largest), torch.nan))

    def _whole(self, values: Tensor) -> Tensor:
        return values[: values.numel() // self.block * self.block]

    def error_bound(self, bound: Tensor, values: Tensor) -> Tensor:
        """A value is a sum of its block's: so are bounds, and what each of the additions, forth and back, rounds."""
        whole = self._whole(values).double().reshape(-1, self.block)
        rounds = 2 * math.log2(self.block) * 2.0**-24 * whole.abs().sum(1, keepdim=True) * self.block
        own = self._whole(bound).reshape(-1, self.block).sum(1, keepdim=True)
        # Subnormal values lose what dividing by the block's length pushes below the smallest one.
        least = self.block**2 * 2.0**-149
        spread = ((1 + 1e-5) * own + rounds + least).expand(-1, self.block).reshape(-1)
        return torch.cat([spread, bound[spread.numel() :]])


TRANSFORMS: dict[str, type[Transform]] = {Hadamard.name: Hadamard}


@dataclass(frozen=True)
class ChainCodec(CompiledCodec):
    """Transforms and a codec, as the spec says: ``hadamard:block=128|int4:block=128,round=nearest``.

    Raises SpecError if a stage is unknown, or the last is not a lossy codec of fp32.
    """

    spec: str

    name: ClassVar[str] = "chain"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[frozenset[torch.dtype]] = FLOAT_DTYPES

    def __post_init__(self) -> None:
        from .spec import parse_stages  # which makes chains

        transforms, codec, coder = parse_stages(self.spec)
        if coder is not None:
            raise SpecError(f"{self.spec!r}: with a byte coder it is a CodedCodec, not a ChainCodec")
        if codec.lossless or torch.float32 not in codec.dtypes:
            raise SpecError(f"{self.spec!r}: a chain ends in a lossy codec of float32, not in {codec}")
        object.__setattr__(self, "_transforms", transforms)
        object.__setattr__(self, "_codec", codec)
        object.__setattr__(self, "spec", "|".join(map(str, (*transforms, codec))))

    _transforms: ClassVar[tuple[Transform, ...]]  # of the instance, but not part of its value
    _codec: ClassVar[Codec]

    @property
    def fixed_size(self) -> bool:  # type: ignore[override]
        return self._codec.fixed_size

    @property
    def needs_feedback(self) -> bool:  # type: ignore[override]
        return self._codec.needs_feedback

    @property
    def granule(self) -> int:
        return math.lcm(self._codec.granule, *(t.granule for t in self._transforms))

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return self._codec.max_nbytes(numel, torch.float32)

    def payload_parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        return self._codec.payload_parts(numel, torch.float32)

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        return self._codec._encode(self._transformed(x), out, seed)

    def _transformed(self, x: Tensor) -> Tensor:
        values = torch.empty(x.numel(), dtype=torch.float32, device=x.device)
        convert(x, values)
        for transform in self._transforms:
            transform.forward(values)
        return values

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        values = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        self._codec._decode(payload, values)
        for transform in reversed(self._transforms):
            transform.inverse(values)
        if values is not out:
            convert(values, out)

    def error_bound(self, x: Tensor) -> Tensor | None:
        """That of the codec on the transformed values, as the transforms spread it; inf near NaN and Inf."""
        flat = x.detach().reshape(-1)
        values = self._transformed(flat)
        bound = self._codec.error_bound(values)
        if bound is None:
            return None
        for transform in reversed(self._transforms):
            bound = transform.error_bound(bound, values)
            transform.inverse(values)
        bound = with_rounding(bound, flat.abs().double() + bound, x.dtype)
        return torch.nan_to_num(bound, nan=torch.inf, posinf=torch.inf).reshape(x.shape)

    def __str__(self) -> str:
        return self.spec
