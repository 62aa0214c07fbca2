"""``exponent``: lossless. Signs and mantissas as they are, exponents in a Huffman code; see reference_exponent."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError, SpecError, WireError
from . import reference_exponent as reference
from . import reference_huffman as huffman
from .base import CompiledCodec
from .cpu import exponent as kernels
from .cpu.exponent_planes import plane_nbytes
from .cpu.huffman import check_lengths
from .registry import register
from .state import CodecState


class Codebook(CodecState):
    """The codebook of an earlier message of a stream."""

    def __init__(self) -> None:
        self.lengths: Any = np.zeros(256, np.int64)
        """Code length of each exponent in bits."""
        self.drop = 0
        self.uses = 0
        """Messages that went with it (the sender's count)."""
        self.rate = 0
        """Bits of 1024 exponents of the message that it was made for."""

    def learn(self, lengths: Any) -> None:
        """Take the codebook that a payload brings."""
        self.lengths = lengths
        self.id = zlib.crc32(huffman.pack_lengths(lengths)) % 65535 + 1

    def dump(self) -> dict[str, Any]:
        table = huffman.pack_lengths(self.lengths).hex()
        return {"lengths": table, "drop": self.drop, "uses": self.uses, "rate": self.rate}

    def load(self, dumped: dict[str, Any]) -> None:
        try:
            table = bytes.fromhex(dumped["lengths"])
            drop, uses, rate = (int(dumped[key]) for key in ("drop", "uses", "rate"))
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"codebook: lengths, drop, uses and rate are needed: {e!r}") from None
        whole = len(table) == huffman.LENGTHS_NBYTES
        if not whole or not check_lengths(np.frombuffer(table, np.uint8), 0):
            raise CheckpointError("codebook: code lengths that are no prefix code of at most 12 bits")
        lengths = huffman.unpack_lengths(table).astype(np.int64)
        lowest, highest = kernels.range_of(lengths)
        if drop not in (0, 13, 16):
            raise CheckpointError(f"codebook: 0, 13 or 16 mantissa bits are dropped, found {drop}")
        self.drop, self.uses, self.rate = drop, uses, rate
        if not lengths.any():
            return
        if lowest > highest or not (lengths[0] and lengths[lowest : highest + 1].all()):
            raise CheckpointError("codebook: 0 or an exponent between others has no code")
        self.learn(lengths)


@register
@dataclass(frozen=True)
class ExponentCodec(CompiledCodec):
    """Every bit of fp32, fp16 or bf16 values; the exponents of neural networks' tensors take 2 to 3 bits of their 8.

    On Gaussian values the payload is 1/1.51 of the raw size for bf16, 1/1.18 for fp16, 1/1.20 for fp32; fp32 values
    that are 16-bit ones in disguise (all low mantissa bits zero) take the size of those. Never more than the raw
    size and 4 bytes.

    reuse: with a state, up to so many messages go with the codebook of an earlier one, in one pass over the values
    instead of two and without its 128 bytes. It is renewed before that when a message does not fit it: other
    exponents than it has, or codes that are longer by a 64th than at its making. Without a state, and with 0, every
    message brings its own.

    Source: canonical Huffman codes of at most 12 bits, in blocks that decode independently; docs/wire-format.md.
    """

    reuse: int = 64

    name: ClassVar[str] = "exponent"
    cuda_kernels: ClassVar[str | None] = "exponent"
    lossless: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.reuse <= 65535:
            raise SpecError(f"exponent: reuse is a number of messages, 0 to 65535, found {self.reuse}")

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return self.reuse > 0

    def new_state(self) -> Codebook | None:
        return Codebook() if self.reuse else None

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return reference.HEADER_NBYTES + numel * dtype.itemsize

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        return self._encode_anew(x, out, False, np.zeros(256, np.int64))

    def _encode_anew(self, x: Tensor, out: Tensor, spare: bool, lengths: Any) -> int:
        if x.is_cuda:
            return int(self._on_cuda().encode(x, out, _mantissa_bits(x.dtype), spare, lengths))
        return int(kernels.encode(_bits(x), _mantissa_bits(x.dtype), spare, lengths, out.numpy()))

    def _encode_stateful(self, x: Tensor, out: Tensor, state: CodecState) -> int:
        book = self._book(state)
        if book.id and book.uses < self.reuse:
            arguments = (_mantissa_bits(x.dtype), book.drop, book.lengths, book.id)
            if x.is_cuda:
                nbytes = int(self._on_cuda().encode_again(x, out, *arguments))
            else:
                nbytes = int(kernels.encode_again(_bits(x), *arguments, out.numpy()))
            if nbytes >= 0:
                rate = _rate(nbytes, reference.HEADER_NBYTES, x, book.drop)
                # Longer codes than when it was new: the next message gets a new one.
                book.uses = self.reuse if rate > book.rate + book.rate // 64 else book.uses + 1
                book.needs = book.id
                return nbytes
        lengths = np.zeros(256, np.int64)
        nbytes = self._encode_anew(x, out, True, lengths)
        book.needs = 0
        mode, drop = out[:2].tolist()
        if mode == 1:
            book.learn(lengths)
            book.drop, book.uses = drop, 0
            book.rate = _rate(nbytes, reference.HEADER_NBYTES + huffman.LENGTHS_NBYTES, x, drop)
        return nbytes

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        self._decode_by(payload, out, 0, np.zeros(256, np.int64))

    def _decode_stateful(self, payload: Tensor, out: Tensor, state: CodecState) -> None:
        book = self._book(state)
        lengths = book.lengths.copy()
        self._decode_by(payload, out, book.id, lengths)
        if int(payload[0]) == 1:
            book.learn(lengths)

    def _decode_by(self, payload: Tensor, out: Tensor, book: int, lengths: Any) -> None:
        """Decode with the codebook of that id, or with the payload's, which ``lengths`` then is."""
        numel, mantissa_bits = out.numel(), _mantissa_bits(out.dtype)
        head = payload[: reference.head_nbytes(numel)].cpu().numpy() if out.is_cuda else payload.numpy()
        wrong = kernels.check(head, payload.numel(), numel, mantissa_bits, out.dtype.itemsize, book)
        if wrong:
            raise WireError(f"{self}: payload of {numel} values in {payload.numel()} bytes: {_ERRORS[wrong]}")
        if out.is_cuda:
            self._on_cuda().decode(payload, head, out, mantissa_bits, lengths)
        else:
            kernels.decode(payload.numpy(), _bits(out), mantissa_bits, lengths)

    def _book(self, state: CodecState) -> Codebook:
        if not isinstance(state, Codebook):
            raise TypeError(f"{self}: the state is {type(state).__name__}, not one of new_state()")
        return state


_ERRORS = (
    "",
    "too short for what it announces",
    "longer or shorter than what it announces",
    "unknown mode or flags",
    "code lengths that are no prefix code of at most 12 bits",
    "a block that is larger than any code can make it",
    "coded with a codebook of an earlier message that is not at hand",
)


def _rate(nbytes: int, head: int, x: Tensor, drop: int) -> int:
    """Bits of 1024 exponents in a coded payload. head: bytes before the streams' sizes."""
    n, blocks = x.numel(), -(-x.numel() // huffman.BLOCK)
    planes = plane_nbytes(n, _mantissa_bits(x.dtype) - drop + 1)
    return int(8192 * (nbytes - head - 2 * blocks - planes) // n)


def _mantissa_bits(dtype: torch.dtype) -> int:
    return {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[dtype]


def _bits(x: Tensor) -> Any:
    return x.numpy().view(np.uint32) if x.dtype == torch.float32 else x.view(torch.uint16).numpy()
