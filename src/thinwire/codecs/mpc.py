"""``mpc``: lossless, by differences and bit transposition. Payload: header, bitmaps, words; see reference_mpc."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError, WireError
from . import reference_mpc as reference
from .base import FLOAT_DTYPES, CompiledCodec
from .cpu import mpc as kernels
from .registry import register


@register
@dataclass(frozen=True)
class MpcCodec(CompiledCodec):
    """Every bit of fp64, fp32, fp16 or bf16 values. A word has 32 bits: one fp32 value, two 16-bit ones, half an fp64.

    dim: 1 to 32, how many words back the predecessor of a word is (the period of interleaved data, in words: 2 for fp64).
    On Gaussian values the payload is 1/1.10 of the raw size for fp32, 1/1.03 for fp16, 1/1.28 for bf16; at
    worst it is larger than the raw size, by 1 bit per word and 8 bytes.

    Source: A. Yang, H. Mukka, F. Hesaaraki, M. Burtscher, "MPC: A Massively Parallel Compression Algorithm
    for Scientific Data", IEEE CLUSTER 2015.
    """

    dim: int = 1

    name: ClassVar[str] = "mpc"
    cuda_kernels: ClassVar[str | None] = "mpc"
    lossless: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = False
    dtypes: ClassVar[frozenset[torch.dtype]] = FLOAT_DTYPES | {torch.float64}

    def __post_init__(self) -> None:
        if not 1 <= self.dim <= 32:
            raise SpecError(f"mpc: dim is 1 to 32 words, found {self.dim}")

    @property
    def granule(self) -> int:
        """One segment of 32-bit words holds as many fp32 values, twice as many 16-bit ones, half as many fp64 ones."""
        return 2 * reference.SEGMENT

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return 4 * reference.max_words(_word_count(numel, dtype))

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        if x.is_cuda:
            return int(self._on_cuda().encode(x, out[: self.max_nbytes(x.numel(), x.dtype)], self.dim))
        data = _bytes(x)
        words = _words(np.concatenate([data, np.zeros(2, np.uint8)]) if len(data) % 4 else data)
        room = out[: self.max_nbytes(x.numel(), x.dtype)].numpy()
        target = _words(room)
        nbytes = 4 * int(kernels.encode(words, self.dim, target))
        if not np.may_share_memory(target, room):
            room[:nbytes] = target[: nbytes // 4].view(np.uint8)
        return nbytes

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        n = _word_count(out.numel(), out.dtype)
        if out.is_cuda:
            self._check_size(payload, n)
            self._check_header(payload, n, *self._on_cuda().header(payload, n))
            self._on_cuda().decode(payload, out, self.dim)
            return
        data = _bytes(out)
        self._check_size(payload, n)
        words = _words(payload.numpy())
        self._check_header(payload, n, int(words[0]), int(words[1]), int(kernels.check(words, n)))
        whole = _words(data) if len(data) % 4 == 0 else np.empty(-(-len(data) // 4), np.uint32)
        kernels.decode(words, self.dim, whole)
        if not np.may_share_memory(whole, data):
            data[:] = whole.view(np.uint8)[: len(data)]

    def _check_size(self, payload: Tensor, n: int) -> None:
        head = _head_nbytes(n)
        if payload.numel() < head or payload.numel() % 4:
            raise WireError(
                f"{self}: payload of {n} words has {head} bytes or more, in fours; found {payload.numel()}"
            )

    def _check_header(self, payload: Tensor, n: int, found_n: int, nonzero: int, counted: int) -> None:
        """Raise WireError unless the header's words, the ones in the bitmaps and the size agree with one another."""
        if found_n != n:
            raise WireError(f"{self}: payload of {n} words expected, its header says {found_n}")
        if counted < 0:
            raise WireError(f"{self}: the last bitmap has bits beyond word {n}")
        sent = (payload.numel() - _head_nbytes(n)) // 4
        if not nonzero == counted == sent:
            raise WireError(f"{self}: header says {nonzero} nonzero words, bitmaps {counted}, size {sent}")


def _head_nbytes(n: int) -> int:
    """Bytes of the header and the bitmaps of n words."""
    return 4 * (reference.max_words(n) - n)


def _word_count(numel: int, dtype: torch.dtype) -> int:
    return -(-numel * dtype.itemsize // 4)


def _bytes(x: Tensor) -> Any:
    """The bytes of a flat tensor. An empty one may have stride 0, which torch refuses to view."""
    return x.view(torch.uint8).numpy() if x.numel() else np.zeros(0, np.uint8)


def _words(data: Any) -> Any:
    """Bytes as uint32; a copy if they do not start at a multiple of 4."""
    return (data if data.ctypes.data % 4 == 0 else data.copy()).view(np.uint32)
