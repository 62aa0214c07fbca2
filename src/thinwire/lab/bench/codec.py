"""Ratio, error and speed of codecs on a sample, beside a plain copy in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...codecs import Codec
from .peers import Peer

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class CodecRow:
    """One codec on one tensor. Speeds are bytes of the tensor per second in ``threads`` threads, medians over repeats."""

    spec: str
    lossless: bool
    dtype: str
    nbytes: int
    threads: int
    ratio: float
    """Raw bytes / payload bytes."""
    rel_l2: float
    """L2 norm of decoded - x over that of x."""
    max_err: float
    """Largest |decoded - x| over the root mean square of x."""
    bias: float
    """Mean of sign(x) * (decoded - x) over the mean of |x|: what is lost (negative) or gained of the magnitude."""
    encode_gb_s: float
    decode_gb_s: float
    decode_add_gb_s: float | None
    """None: not there (peers)."""
    copy_gb_s: float
    """``copy_`` of the same tensor, cut for as many threads in the same way, timed in turn with the codec."""
    plain_add_gb_s: float
    """``add_`` of the same tensor into an fp32 one, likewise: what decode_add does, without a codec."""


def sample(rows: int = 2048, columns: int = 1024, seed: int = 0, decades: float = 2) -> Tensor:
    """An fp32 tensor like a weight's gradient: Gaussian, rms near 1e-6, rows whose scales differ by up to 10**decades."""
    rng = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (decades * torch.rand(rows, 1, generator=rng) - (5 + decades))
    return torch.randn(rows, columns, generator=rng) * scale


def measure(codec: Codec, x: Tensor, repeats: int = 5, threads: int = 1, *, stream: bool = False) -> CodecRow:
    """:func:`measure_threads` for one number of threads."""
    return measure_threads(codec, x, repeats, [threads], stream=stream)[0]


def measure_threads(
    codec: Codec, x: Tensor, repeats: int, threads: Sequence[int], *, stream: bool = False
) -> list[CodecRow]:
    """Time ``codec`` on x (contiguous, on the CPU), all numbers of threads in turn, and compare x with what comes back.

    threads: the tensor is cut at multiples of the codec's granule and each thread codes, or copies, a part, as collectives
    do with their chunks. stream: x comes again and again in a stream, so that a stateful codec uses what it remembers.
    """
    cuts = [_Cut(codec, x, count, stream) for count in threads]
    with ThreadPoolExecutor(max(threads)) as pool:
        calls = [partial(cut.each, work, pool) for cut in cuts for work in _WORKS]
        seconds = iter(map(median, in_turns(calls, repeats)))
    return [cut.row(dict(zip(_WORKS, seconds, strict=False))) for cut in cuts]


class _Cut:
    """A tensor cut for so many threads."""

    def __init__(self, codec: Codec, x: Tensor, threads: int, stream: bool) -> None:
        self._spec, self._lossless = f"{codec} in a stream" if stream else str(codec), codec.lossless
        self._x, self._threads = x.reshape(-1), threads
        self._decoded, total = torch.empty_like(self._x), torch.zeros(x.numel())
        self._parts = []
        for a, b in _spans(x.numel(), codec.granule, threads):
            room = torch.empty(codec.max_nbytes(b - a, x.dtype), dtype=torch.uint8)
            self._parts.append(_Part(codec, self._x[a:b], self._decoded[a:b], total[a:b], room, stream))

    def each(self, work: Callable[[_Part], object], pool: ThreadPoolExecutor, count: int) -> None:
        """Every thread does the work on its part ``count`` times."""
        if len(self._parts) == 1:
            again(work, self._parts[0], count)
        else:
            list(pool.map(lambda part: again(work, part, count), self._parts))

    def row(self, seconds: dict[Callable[[_Part], object], float]) -> CodecRow:
        """The result, from what each kind of work took."""
        speeds = {work: self._x.nbytes / s / 1e9 for work, s in seconds.items()}
        for part in self._parts:
            part.decode()
        return CodecRow(
            spec=self._spec,
            lossless=self._lossless,
            threads=self._threads,
            encode_gb_s=speeds[_Part.encode],
            decode_gb_s=speeds[_Part.decode],
            decode_add_gb_s=speeds[_Part.decode_add],
            copy_gb_s=speeds[_Part.copy],
            plain_add_gb_s=speeds[_Part.plain_add],
            **_compare(self._x, self._decoded, sum(part.payload.numel() for part in self._parts)),
        )


class _Part:
    """What one thread codes: a run of values, with the states of its stream."""

    def __init__(
        self, codec: Codec, x: Tensor, decoded: Tensor, total: Tensor, room: Tensor, stream: bool
    ) -> None:
        self._codec, self._x, self._decoded, self._total, self._room = codec, x, decoded, total, room
        self._sender, self._receiver = (codec.new_state() if stream else None for _ in range(2))
        self.payload = room[: self.encode()].clone()
        if stream:
            self.decode()
            self.payload = room[: self.encode()].clone()

    def copy(self) -> None:
        self._decoded.copy_(self._x)

    def plain_add(self) -> None:
        self._total.add_(self._x)

    def encode(self) -> int:
        return self._codec.encode(self._x, self._room, state=self._sender)

    def decode(self) -> None:
        self._codec.decode(self.payload, self._decoded, state=self._receiver)

    def decode_add(self) -> None:
        self._codec.decode_add(self.payload, self._total, self._x.dtype, state=self._receiver)


_WORKS = (_Part.copy, _Part.plain_add, _Part.encode, _Part.decode, _Part.decode_add)


def measure_peer(peer: Peer, x: Tensor, repeats: int = 5) -> CodecRow:
    """The same of another library, in one thread and as it is called: it allocates its outputs."""
    flat, copied, total = x.reshape(-1), torch.empty_like(x.reshape(-1)), torch.zeros(x.numel())
    payload = peer.encode(flat)
    works: list[Callable[[Tensor], object]] = [
        copied.copy_,
        total.add_,
        peer.encode,
        lambda x: peer.decode(payload, x),
    ]
    calls = [lambda count, work=work: again(work, flat, count) for work in works]
    copy_s, plain_add_s, encode_s, decode_s = map(median, in_turns(calls, repeats))
    return CodecRow(
        spec=peer.name,
        lossless=peer.lossless,
        threads=1,
        encode_gb_s=x.nbytes / encode_s / 1e9,
        decode_gb_s=x.nbytes / decode_s / 1e9,
        decode_add_gb_s=None,
        copy_gb_s=x.nbytes / copy_s / 1e9,
        plain_add_gb_s=x.nbytes / plain_add_s / 1e9,
        **_compare(flat, peer.decode(payload, flat), len(payload)),
    )


def _spans(numel: int, granule: int, parts: int) -> list[tuple[int, int]]:
    """Up to ``parts`` equal runs of values that begin at multiples of the granule."""
    step = -(-numel // parts // granule) * granule or granule
    return [(a, min(a + step, numel)) for a in range(0, max(numel, 1), step)]


def _compare(x: Tensor, decoded: Tensor, payload_nbytes: int) -> dict[str, Any]:
    exact, error = x.double(), decoded.double() - x.double()
    norm = float(exact.norm()) or 1.0
    size = float(exact.abs().sum()) or 1.0
    return {
        "dtype": str(x.dtype).removeprefix("torch."),
        "nbytes": x.nbytes,
        "ratio": x.nbytes / max(payload_nbytes, 1),
        "rel_l2": float(error.norm()) / norm,
        "max_err": float(error.abs().max()) / (norm / x.numel() ** 0.5) if x.numel() else 0.0,
        "bias": float((exact.sign() * error).sum()) / size,
    }


_LEAST_S = 2e-3  # of a timed sample: short calls are repeated in it


def again(work: Callable[[Any], object], on: Any, count: int) -> None:
    """Do the work ``count`` times, in the thread that calls."""
    for _ in range(count):
        work(on)


def in_turns(calls: Sequence[Callable[[int], object]], repeats: int) -> list[list[float]]:
    """Seconds of each call in every repeat; it gets how often it is to do its work. The calls take turns.

    So a disturbance hits all of them.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        counts = []
        for call in calls:
            call(1)
            counts.append(max(1, int(_LEAST_S / max(_seconds(call, 1), 1e-7))))
        seconds: list[list[float]] = [[] for _ in calls]
        for _ in range(repeats):
            for call, count, times in zip(calls, counts, seconds, strict=True):
                times.append(_seconds(call, count))
    finally:
        torch.set_num_threads(before)
    return seconds


def _seconds(call: Callable[[int], object], count: int) -> float:
    start = time.perf_counter()
    call(count)
    return (time.perf_counter() - start) / count


def table(rows: Sequence[CodecRow]) -> Table:
    """The rows for a terminal of 80 columns or more; speeds in GB/s."""
    from rich import box
    from rich.table import Table

    shown = Table(
        title="speeds: GB/s of the uncompressed tensor, one thread", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1)
    )
    shown.add_column("codec", overflow="fold", min_width=16)
    for title in ("ratio", "rel. L2", "max/rms", "encode", "decode", "+add", "copy_", "add_"):
        shown.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        errors = ("lossless", "") if row.lossless else (f"{row.rel_l2:.1e}", f"{row.max_err:.1e}")
        speeds = (row.encode_gb_s, row.decode_gb_s, row.decode_add_gb_s, row.copy_gb_s, row.plain_add_gb_s)
        shown.add_row(
            row.spec, f"{row.ratio:.2f}", *errors, *("" if s is None else f"{s:.2f}" for s in speeds)
        )
    return shown
