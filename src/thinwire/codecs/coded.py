"""A codec and a byte coder: ``int4|huffman``. The codec's payload is coded once more, without loss.

A byte coder knows bytes only. What it gains is what the codec leaves: integers of a block are not all equally frequent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError, WireError
from .base import Codec, CompiledCodec, full_spec
from .chain import ChainCodec
from .cpu import coded as kernels


class ByteCoder(ABC):
    """A stage after the codec. Subclasses are frozen dataclasses, as codecs are. Payloads are flat uint8 on the CPU."""

    name: ClassVar[str]

    @abstractmethod
    def max_nbytes(self, parts: Sequence[int]) -> int:
        """Upper bound of what a payload with parts of these sizes becomes."""

    @abstractmethod
    def encode(self, payload: Tensor, parts: Sequence[int], out: Tensor) -> int:
        """Write the coded payload to the head of ``out`` and return its size in bytes."""

    @abstractmethod
    def check(self, coded: Tensor, parts: Sequence[int]) -> str | None:
        """What makes it impossible to decode these bytes; None if :meth:`decode` may read them."""

    @abstractmethod
    def decode(self, coded: Tensor, parts: Sequence[int], payload: Tensor) -> None:
        """Write the payload; ``coded`` has passed :meth:`check`, and may be damaged all the same."""

    def __str__(self) -> str:
        return full_spec(self)


@dataclass(frozen=True)
class Huffman(ByteCoder):
    """Canonical Huffman codes of at most 12 bits over bytes, one code for each part of the payload.

    Parts (scales, codes) that would not get smaller go as they are, so that a payload grows by one byte a part at most.
    Blocks of 1024 bytes decode independently. A code takes 128 bytes, so that small messages gain less: int4 1.08 on 4096
    values where it has 1.13 on many.

    Source: canonical Huffman codes as in ``exponent``; docs/wire-format.md.
    """

    name: ClassVar[str] = "huffman"

    def max_nbytes(self, parts: Sequence[int]) -> int:
        return sum(parts) + len(parts)

    def encode(self, payload: Tensor, parts: Sequence[int], out: Tensor) -> int:
        return int(kernels.encode(payload.numpy(), np.array(parts, np.int64), out.numpy()))

    def check(self, coded: Tensor, parts: Sequence[int]) -> str | None:
        return _ERRORS[kernels.check(coded.numpy(), np.array(parts, np.int64))]

    def decode(self, coded: Tensor, parts: Sequence[int], payload: Tensor) -> None:
        kernels.decode(coded.numpy(), np.array(parts, np.int64), payload.numpy())


_ERRORS = (
    None,
    "shorter or longer than what it announces",
    "unknown mode",
    "code lengths that are no prefix code of at most 12 bits",
    "a block that is larger than any code can make it",
)

BYTE_CODERS: dict[str, type[ByteCoder]] = {Huffman.name: Huffman}


@dataclass(frozen=True)
class CodedCodec(CompiledCodec):
    """A lossy codec of fixed size (with transforms or without) and a byte coder: ``int4:block=128,round=nearest|huffman``.

    Values, their error and its bound are the codec's; only the payload is another. On Gaussian values it is smaller by
    1.06 (int8), 1.13 (int4), 1.23 (int4:block=1024), 1.74 (int2), 1.21 (fp8), and coding takes two to five times as long:
    it pays with int4, int2, fp8 on links under 170 to 640 Mbit/s, and hardly with int5, int3, nvfp4, topk and sign
    (docs/log.md). For bf16 values there is ``exponent``, which gains more than ``bf16|huffman``.

    Raises SpecError if a stage is unknown, or the codec is lossless or of variable size.
    """

    spec: str

    name: ClassVar[str] = "coded"
    lossless: ClassVar[bool] = False
    fixed_size: ClassVar[bool] = False

    def __post_init__(self) -> None:
        from .spec import parse_stages  # which makes these

        transforms, codec, coder = parse_stages(self.spec)
        if coder is None:
            raise SpecError(f"{self.spec!r}: a byte coder comes last: {', '.join(BYTE_CODERS)}")
        if codec.lossless or not codec.fixed_size:
            what = (
                "is lossless; 'exponent' codes values without loss" if codec.lossless else "has no fixed size"
            )
            raise SpecError(
                f"{self.spec!r}: {coder} codes the bytes of a lossy codec of fixed size; {codec} {what}"
            )
        inner = ChainCodec("|".join(map(str, (*transforms, codec)))) if transforms else codec
        object.__setattr__(self, "_codec", inner)
        object.__setattr__(self, "_coder", coder)
        object.__setattr__(self, "spec", f"{inner}|{coder}")

    _codec: ClassVar[Codec]  # of the instance, but not part of its value
    _coder: ClassVar[ByteCoder]

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        return self._codec.dtypes

    @property
    def needs_feedback(self) -> bool:  # type: ignore[override]
        return self._codec.needs_feedback

    @property
    def granule(self) -> int:
        return self._codec.granule

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return self._coder.max_nbytes(self._codec.payload_parts(numel, dtype))

    def error_bound(self, x: Tensor) -> Tensor | None:
        """The codec's."""
        return self._codec.error_bound(x)

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        parts = self._codec.payload_parts(x.numel(), x.dtype)
        payload = torch.empty(sum(parts), dtype=torch.uint8)
        self._codec._encode(x, payload, seed)
        return self._coder.encode(payload, parts, out)

    def _encode_residual(self, x: Tensor, out: Tensor, residual: Tensor, seed: int) -> int:
        parts = self._codec.payload_parts(x.numel(), x.dtype)
        payload = torch.empty(sum(parts), dtype=torch.uint8)
        self._codec._encode_residual(x, payload, residual, seed)
        return self._coder.encode(payload, parts, out)

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        self._codec._decode(self._payload(payload, out.numel(), out.dtype), out)

    def _decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        self._codec._decode_add(self._payload(payload, out.numel(), dtype), out, dtype)

    def _payload(self, coded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """The codec's payload. Raises WireError if the bytes cannot be one."""
        parts = self._codec.payload_parts(numel, dtype)
        error = self._coder.check(coded, parts)
        if error is not None:
            raise WireError(f"{self}: payload of {numel} values in {coded.numel()} bytes: {error}")
        payload = torch.empty(sum(parts), dtype=torch.uint8)
        self._coder.decode(coded, parts, payload)
        return payload

    def __str__(self) -> str:
        return self.spec
