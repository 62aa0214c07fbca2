"""What a policy can name: a codec, which is a pure function from a tensor to bytes and back, or another compressor.

The payload depends on the codec's parameters, the input values and the seed only; never on the device,
the number of threads or the libraries that happen to be installed. A codec holds no state: what a stateful one remembers
of earlier messages is an argument.

To write one: a frozen dataclass that derives from :class:`Codec`, sets ``name``, ``lossless``, ``dtypes``
and ``fixed_size``, and implements ``max_nbytes``, ``_encode``, ``_decode`` and ``_decode_add``.
``thinwire.testing.check_codec`` then tells whether it keeps the promises made here.
"""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import UnsupportedError, WireError
from .cpu import cast as kernels
from .state import CodecState

FLOAT_DTYPES: frozenset[torch.dtype] = frozenset({torch.float32, torch.float16, torch.bfloat16})


class Compressor(ABC):
    """What a policy can name for a kind of message: a :class:`Codec`, or something that takes more than one message.

    Subclasses are frozen dataclasses: equal parameters, equal compressors. ``str(compressor)`` is its spec, which
    :func:`thinwire.codecs.parse_compressor` reads back.
    """

    name: ClassVar[str]
    """What a spec starts with."""
    lossless: ClassVar[bool]
    """Every bit pattern comes back: NaN payloads, signed zeros, subnormals."""
    needs_feedback: ClassVar[bool] = False
    """So coarse or biased that training needs error feedback with it; policies refuse it elsewhere."""

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Of the values that it takes; a subclass may have a class attribute in its place."""
        return FLOAT_DTYPES

    @abstractmethod
    def shrinks(self, dtype: torch.dtype) -> bool:
        """Whether a message of this dtype gets smaller (where that depends on the values or the shape: may get)."""

    @abstractmethod
    def warm_up(self) -> None:
        """Compile or load the CPU kernels, so that the first step does not wait for them."""

    def dtype_message(self, dtype: torch.dtype) -> str:
        """Says that values of this dtype are refused, and which are not."""
        known = ", ".join(sorted(str(d).removeprefix("torch.") for d in self.dtypes))
        return f"{self} takes {known}, not {str(dtype).removeprefix('torch.')}"

    def __str__(self) -> str:
        return full_spec(self)


class Codec(Compressor):
    """A codec with its parameters; a spec gives one to :func:`thinwire.codecs.parse`."""

    fixed_size: ClassVar[bool]
    """The payload's size follows from (numel, dtype) alone, so ranks need not exchange sizes."""
    stateful: ClassVar[bool] = False
    """There is something to remember of earlier messages: ``new_state`` gives a state."""

    @property
    def granule(self) -> int:
        """Values that are coded together. Splitting a tensor at its multiples does not change the values."""
        return 1

    @abstractmethod
    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Upper bound of the payload in bytes; the exact size if ``fixed_size``."""

    def payload_parts(self, numel: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Sizes of a payload's parts whose bytes are alike, in their order, if ``fixed_size``: scales, then codes.

        A byte coder has a code for each.
        """
        return (self.max_nbytes(numel, dtype),)

    def new_state(self) -> CodecState | None:
        """An empty memory of one stream of messages, for one of its ends; None: this codec has none.

        Only lossless codecs have one: what others lose would have to be known without the receiver's.
        """
        return None

    def encode(self, x: Tensor, out: Tensor, *, seed: int = 0, state: CodecState | None = None) -> int:
        """Write the payload of ``x`` to the head of ``out`` and return its size in bytes.

        x: contiguous, any shape, one of ``dtypes``. out: 1-D uint8, contiguous, same device, at least
        ``max_nbytes`` long, not overlapping x. seed: feeds stochastic rounding; other codecs ignore it.
        state: of this codec, the sender's of the stream; None: the payload stands for itself.

        Raises UnsupportedError (dtype, device, layout) or ValueError (out too small) before anything is
        written. Never raises for the values in x: one rank that raises inside a collective hangs its peers.
        """
        self._check_encode(x, out)
        if state is not None:
            return self._encode_stateful(_flat(x), out, state)
        return self._encode(_flat(x), out, seed)

    def encode_residual(
        self, x: Tensor, out: Tensor, residual: Tensor, *, seed: int = 0, state: CodecState | None = None
    ) -> int:
        """Encode as :meth:`encode` and write ``residual = x - decoded``, which error feedback needs.

        x, residual: contiguous float32 of the same numel; residual may be x itself, nothing else may overlap.
        Where the decoded value is not finite, neither is the residual. Raises as :meth:`encode`.
        """
        self._check_encode(x, out)
        self._check_tensor(residual, "residual")
        if x.dtype != torch.float32 or residual.dtype != torch.float32 or x.numel() != residual.numel():
            raise UnsupportedError(
                f"{self}: encode_residual needs float32 input and residual of one size, got "
                f"{x.dtype} {tuple(x.shape)} and {residual.dtype} {tuple(residual.shape)}"
            )
        _check_overlap(self, residual, out)
        if residual.data_ptr() != x.data_ptr():
            _check_overlap(self, x, residual)
        if state is not None:
            size = self._encode_stateful(_flat(x), out, state)
            torch.sub(x, x, out=residual)  # lossless: 0, or NaN where x is not finite
            return size
        return self._encode_residual(_flat(x), out, _flat(residual), seed)

    def decode(self, payload: Tensor, out: Tensor, *, state: CodecState | None = None) -> None:
        """Write the values of ``payload`` (1-D uint8, exactly one payload) to ``out``.

        out: contiguous, of the numel and dtype that were encoded. state: the receiver's of the stream, if the
        sender had one. Raises WireError if the payload cannot be one of this codec for that numel and dtype, or
        needs a state that is not there; whatever it holds, decoding ends and is memory-safe.
        """
        self._check_tensor(out, "out")
        self._check_payload(payload, out.numel(), out.dtype, out.device)
        _check_overlap(self, payload, out)
        if state is not None:
            self._decode_stateful(payload, _flat(out), state)
        else:
            self._decode(payload, _flat(out))

    def decode_add(
        self, payload: Tensor, out: Tensor, dtype: torch.dtype, *, state: CodecState | None = None
    ) -> None:
        """Add the values of ``payload`` to ``out``, an fp32 tensor. dtype: the one that was encoded.

        The sum is ``out + float32(decoded value)``, one rounding; sparse codecs leave out the zeros (so a negative
        zero in ``out`` stays one). Raises as :meth:`decode`.
        """
        if out.dtype != torch.float32 or not out.is_contiguous():
            raise UnsupportedError(f"{self}: decode_add needs a contiguous float32 output, got {out.dtype}")
        self._check_dtype(dtype, out.device)
        self._check_payload(payload, out.numel(), dtype, out.device)
        _check_overlap(self, payload, out)
        if state is not None:
            values = torch.empty(out.numel(), dtype=dtype, device=out.device)
            self._decode_stateful(payload, values, state)
            add(values.view(torch.uint8), dtype, _flat(out))
        else:
            self._decode_add(payload, _flat(out), dtype)

    def error_bound(self, x: Tensor) -> Tensor | None:
        """Bound of |decoded - x| for each element (float64, shape of x), or None where there is none."""
        return torch.zeros(x.shape, dtype=torch.float64) if self.lossless else None

    def shrinks(self, dtype: torch.dtype) -> bool:
        if dtype not in self.dtypes:
            return False
        return not self.fixed_size or self.max_nbytes(4096, dtype) < 4096 * dtype.itemsize

    def warm_up(self) -> None:
        for dtype in sorted(self.dtypes, key=str):
            x = torch.linspace(-1, 1, 100).to(dtype)
            out = torch.empty(self.max_nbytes(x.numel(), dtype), dtype=torch.uint8)
            payload = out[: self.encode(x, out)]
            self.decode(payload, torch.empty_like(x))
            self.decode_add(payload, torch.zeros(x.numel()), dtype)
            if dtype == torch.float32:
                self.encode_residual(x, out, torch.empty_like(x))

    # What a codec implements. x and out are flat and checked.

    @abstractmethod
    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int: ...

    @abstractmethod
    def _decode(self, payload: Tensor, out: Tensor) -> None: ...

    def _encode_residual(self, x: Tensor, out: Tensor, residual: Tensor, seed: int) -> int:
        size = self._encode(x, out, seed)
        values = torch.empty_like(x)
        self._decode(out[:size], values)
        torch.sub(x, values, out=residual)
        return size

    def _decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        values = torch.empty(out.numel(), dtype=dtype, device=out.device)
        self._decode(payload, values)
        add(values.view(torch.uint8), dtype, out)

    def _encode_stateful(self, x: Tensor, out: Tensor, state: CodecState) -> int:
        raise UnsupportedError(f"{self} takes no state: encode without")

    def _decode_stateful(self, payload: Tensor, out: Tensor, state: CodecState) -> None:
        raise UnsupportedError(f"{self} takes no state: decode without")

    # Shared checks.

    def _check_tensor(self, x: Tensor, what: str) -> None:
        self._check_dtype(x.dtype, x.device)
        if not x.is_contiguous():
            raise UnsupportedError(f"{self}: {what} is not contiguous; call .contiguous() first")

    def _check_dtype(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raise UnsupportedError if values of this dtype are not coded, or not on this device."""
        if dtype not in self.dtypes:
            raise UnsupportedError(self.dtype_message(dtype))
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"{self}: the values are on {device}; cpu and cuda are supported")

    def _check_encode(self, x: Tensor, out: Tensor) -> None:
        self._check_tensor(x, "input")
        self._check_bytes(out, "out", x.device)
        numel = x.numel()
        need = self.max_nbytes(numel, x.dtype)
        if out.numel() < need:
            raise ValueError(f"{self}: out holds {out.numel()} bytes, {need} are needed for {numel} values")
        _check_overlap(self, x, out)

    def _check_bytes(self, b: Tensor, what: str, device: torch.device) -> None:
        if b.dtype != torch.uint8 or b.dim() != 1 or not b.is_contiguous():
            raise UnsupportedError(
                f"{self}: {what} must be a contiguous 1-D uint8 tensor, got {b.dtype} {tuple(b.shape)}"
            )
        if b.device != device:
            raise UnsupportedError(f"{self}: {what} is on {b.device}, the values are on {device}")

    def _check_payload(self, payload: Tensor, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._check_bytes(payload, "payload", device)
        limit = self.max_nbytes(numel, dtype)
        found = payload.numel()
        if found > limit or (self.fixed_size and found != limit):
            relation = "exactly" if self.fixed_size else "at most"
            raise WireError(
                f"{self}: payload of {numel} {dtype} values has {relation} {limit} bytes, found {found}"
            )


class CompiledCodec(Codec):
    """A codec of kernels: numba's on the CPU, Triton's on CUDA if there are some. Other tensors are refused, not copied."""

    cuda_kernels: ClassVar[str | None] = None
    """Module of ``codecs.cuda``; None: there is none yet."""
    cuda_dtypes: ClassVar[frozenset[torch.dtype]] = FLOAT_DTYPES | {torch.float64}
    """Of ``dtypes``, those that the kernels of CUDA take."""

    def _check_dtype(self, dtype: torch.dtype, device: torch.device) -> None:
        super()._check_dtype(dtype, device)
        if device.type != "cpu" and self.cuda_kernels is None:
            raise UnsupportedError(
                f"{self} has no {device.type} kernel yet; block integers, zfp, mpc, exponent and casts have one"
            )
        if device.type != "cpu" and dtype not in self.cuda_dtypes:
            raise UnsupportedError(
                f"{self} has no {device.type} kernel for {str(dtype).removeprefix('torch.')} yet; copy the values to the CPU"
            )

    def _on_cuda(self) -> Any:
        """The Triton kernels. Raises UnsupportedError if Triton is not installed."""
        try:
            return importlib.import_module(f"thinwire.codecs.cuda.{self.cuda_kernels}")
        except ModuleNotFoundError as e:
            if e.name != "triton":
                raise
            raise UnsupportedError(
                f'{self} on a GPU needs Triton; install it with: pip install "thinwire[gpu]"'
            ) from None


def full_spec(stage: Any) -> str:
    """Name and parameters of a codec or another stage, a dataclass: ``int4:block=128,round=nearest``."""
    fields = [f"{f.name}={getattr(stage, f.name)}" for f in dataclasses.fields(stage)]
    return f"{stage.name}:{','.join(fields)}" if fields else str(stage.name)


def _flat(x: Tensor) -> Tensor:
    """The same memory as a 1-D tensor outside of autograd. Small messages feel every call into torch."""
    if x.requires_grad:
        x = x.detach()
    return x if x.dim() == 1 else x.view(-1)


def add(data: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    """Add values (flat; as bytes, at any alignment) to fp32 ones. fp64 would be added before it is rounded."""
    if dtype.itemsize == 2 and not out.is_cuda:
        kernels.add(data.numpy(), out.numpy(), dtype == torch.float16)  # torch's own takes four times as long
        return
    values = (data if is_aligned(data, dtype) else data.clone()).view(dtype)
    out += values.float() if dtype == torch.float64 else values


def is_aligned(data: Tensor, dtype: torch.dtype) -> bool:
    """Whether bytes can be viewed as values of ``dtype``."""
    return data.storage_offset() % dtype.itemsize == 0 and data.data_ptr() % dtype.itemsize == 0


def _check_overlap(codec: Codec, x: Tensor, out: Tensor) -> None:
    """Raise if two contiguous tensors on one device share memory."""
    a, b = x.data_ptr(), out.data_ptr()
    if a < b + out.nbytes and b < a + x.nbytes and x.nbytes and out.nbytes:
        raise UnsupportedError(f"{codec}: out overlaps the input")
