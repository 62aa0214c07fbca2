"""Ratio, error and speed of codecs on a sample, beside a plain copy in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...codecs import Codec

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class CodecRow:
    """One codec on one tensor. Speeds are bytes of the tensor per second, in one thread, medians over repeats."""

    spec: str
    lossless: bool
    ratio: float
    """Raw bytes / payload bytes."""
    rel_l2: float
    """L2 norm of decoded - x over that of x."""
    max_err: float
    """Largest |decoded - x| over the root mean square of x."""
    encode_gb_s: float
    decode_gb_s: float
    decode_add_gb_s: float
    copy_gb_s: float
    """``copy_`` of the same tensor, timed in turn with the codec."""


def sample(rows: int = 2048, columns: int = 1024, seed: int = 0) -> Tensor:
    """An fp32 tensor like a weight's gradient: Gaussian, rms near 1e-6, rows whose scales differ by up to 100."""
    rng = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (2 * torch.rand(rows, 1, generator=rng) - 7)
    return torch.randn(rows, columns, generator=rng) * scale


def measure(codec: Codec, x: Tensor, repeats: int = 5) -> CodecRow:
    """Time ``codec`` on x (contiguous, on the CPU), after one untimed run, and compare x with what comes back."""
    payload = torch.empty(codec.max_nbytes(x.numel(), x.dtype), dtype=torch.uint8)
    payload = payload[: codec.encode(x, payload)]
    room = torch.empty(codec.max_nbytes(x.numel(), x.dtype), dtype=torch.uint8)
    decoded, copied, total = torch.empty_like(x), torch.empty_like(x), torch.zeros(x.shape)
    calls: list[Callable[[], object]] = [
        lambda: copied.copy_(x),
        lambda: codec.encode(x, room),
        lambda: codec.decode(payload, decoded),
        lambda: codec.decode_add(payload, total, x.dtype),
    ]
    copy_s, encode_s, decode_s, add_s = _alternate(calls, repeats)
    exact, error = x.double(), decoded.double() - x.double()
    norm = float(exact.norm()) or 1.0
    nbytes = x.numel() * x.element_size()
    return CodecRow(
        spec=str(codec),
        lossless=codec.lossless,
        ratio=nbytes / max(payload.numel(), 1),
        rel_l2=float(error.norm()) / norm,
        max_err=float(error.abs().max()) / (norm / x.numel() ** 0.5) if x.numel() else 0.0,
        encode_gb_s=nbytes / encode_s / 1e9,
        decode_gb_s=nbytes / decode_s / 1e9,
        decode_add_gb_s=nbytes / add_s / 1e9,
        copy_gb_s=nbytes / copy_s / 1e9,
    )


def _alternate(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each call; the calls take turns, so that a disturbance hits all of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for call in calls:
            call()
        seconds: list[list[float]] = [[] for _ in calls]
        for _ in range(repeats):
            for call, times in zip(calls, seconds, strict=True):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return [median(times) for times in seconds]


def table(rows: Sequence[CodecRow]) -> Table:
    """The rows for a terminal of 80 columns or more; speeds in GB/s."""
    from rich import box
    from rich.table import Table

    shown = Table(
        title="speeds: GB/s of the uncompressed tensor, one thread", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1)
    )
    shown.add_column("codec", overflow="fold", min_width=16)
    for title in ("ratio", "rel. L2", "max/rms", "encode", "decode", "+add", "copy"):
        shown.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        errors = ("lossless", "") if row.lossless else (f"{row.rel_l2:.1e}", f"{row.max_err:.1e}")
        speeds = (row.encode_gb_s, row.decode_gb_s, row.decode_add_gb_s, row.copy_gb_s)
        shown.add_row(row.spec, f"{row.ratio:.2f}", *errors, *(f"{s:.2f}" for s in speeds))
    return shown
