"""What was sent: raw against wire bytes, and the time in encode, wire and decode, per kind of message.

Wire bytes are counted at the transport call: headers, scales and indices are in them, the network's own
headers are not. What ranks of a host hand each other in shared memory is counted apart. Raw bytes are what
the uncompressed op would have sent per rank with the least traffic that the op allows (:func:`raw_nbytes`).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

from torch.autograd import profiler

PASS_THROUGH = "pass-through"
"""What stands for the codec of a message that is sent as it is because no codec applies to it."""


_NO_RANGE: AbstractContextManager[Any] = nullcontext()


def _profiled(name: str) -> AbstractContextManager[Any]:
    """A range ``name`` in a torch profiler's trace, if one runs in this process; else nothing, at the cost of a look."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NO_RANGE


@dataclass
class Tally:
    """One call's cost. Seconds of encode and decode are CPU seconds, those of the wire are waiting.

    A torch profiler that sees all threads (``profile_all_threads``) shows them as ranges ``thinwire::encode``,
    ``thinwire::wire`` and ``thinwire::decode``.
    """

    wire_bytes: int = 0
    memory_bytes: int = 0
    """Given to ranks of the same host through memory that they share, as they are; not in ``wire_bytes``."""
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    two_phase: int = 0
    """Size exchanges that had to go before the payload (codecs of variable size)."""
    padded: int = 0
    """Exchanges of variable-size frames that were padded to their upper bound instead."""

    @contextmanager
    def encoding(self) -> Iterator[None]:
        start = time.thread_time()
        with _profiled("thinwire::encode"):
            yield
        self.encode_s += time.thread_time() - start

    @contextmanager
    def decoding(self) -> Iterator[None]:
        start = time.thread_time()
        with _profiled("thinwire::decode"):
            yield
        self.decode_s += time.thread_time() - start

    @contextmanager
    def waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        with _profiled("thinwire::wire"):
            yield
        self.wire_s += time.perf_counter() - start

    def add(self, other: Tally) -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass(frozen=True, order=True)
class Message:
    """A kind of message. codec: a codec's spec, or ``PASS_THROUGH``."""

    axis: str
    op: str
    role: str
    codec: str
    dtype: str
    nbytes: int
    """Bytes of the uncompressed tensor."""

    def __str__(self) -> str:
        return f"{self.op}, {self.role}, {self.codec}, {self.dtype}, {self.nbytes} bytes"


@dataclass
class Errors:
    """What an error monitor has found in sampled calls. Errors are relative L2 errors of what was encoded."""

    sampled: int = 0
    nonfinite: int = 0
    """Sampled calls with NaN or Inf in what was encoded: they have no error."""
    last: float | None = None
    max: float | None = None
    seconds: float = 0.0
    """What measuring took: CPU time, and waiting for the other ranks' results."""


@dataclass
class Entry:
    """How often a message was sent, and what that cost."""

    calls: int = 0
    raw_bytes: float = 0.0
    tally: Tally = field(default_factory=Tally)
    errors: Errors = field(default_factory=Errors)


class Traffic:
    """The entries of one group or one run. Safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: dict[Message, Entry] = defaultdict(Entry)
        self._lock = threading.Lock()

    def add(self, message: Message, raw_bytes: float, tally: Tally) -> None:
        """Count one call."""
        with self._lock:
            entry = self._entries[message]
            entry.calls += 1
            entry.raw_bytes += raw_bytes
            entry.tally.add(tally)

    def add_error(self, message: Message, error: float | None, *, nonfinite: bool, seconds: float) -> None:
        """Count a sampled call. error: None if there is none: only zeros were encoded, or ``nonfinite``."""
        with self._lock:
            errors = self._entries[message].errors
            errors.sampled += 1
            errors.nonfinite += nonfinite
            errors.seconds += seconds
            if error is not None:
                errors.last = error
                errors.max = error if errors.max is None else max(errors.max, error)

    def reset(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def entries(self) -> dict[Message, Entry]:
        """A copy, sorted by axis, op, role, codec, dtype and size."""
        with self._lock:
            return {message: deepcopy(entry) for message, entry in sorted(self._entries.items())}

    def by_axis(self) -> dict[str, dict[str, float]]:
        """Sums per axis: calls, raw_bytes, and those of :class:`Tally`."""
        sums: dict[str, dict[str, float]] = {}
        for message, entry in self.entries().items():
            into = sums.setdefault(message.axis, defaultdict(float))
            into["calls"] += entry.calls
            into["raw_bytes"] += entry.raw_bytes
            for f in fields(entry.tally):
                into[f.name] += getattr(entry.tally, f.name)
        return {axis: dict(values) for axis, values in sums.items()}


def raw_nbytes(op: str, nbytes: int, world: int) -> float:
    """Least bytes that a rank sends for an uncompressed op, on average over the ranks.

    nbytes: the full tensor for all_reduce, reduce_scatter, all_gather (its output), all_to_all (its input)
    and broadcast; the message for send.
    """
    share = (world - 1) / world
    if op == "all_reduce":
        return 2 * share * nbytes
    if op in ("reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter"):
        return share * nbytes
    return nbytes if op == "send" else 0.0


def gloo_nbytes(op: str, nbytes: int, world: int) -> float:
    """What gloo's own collective sends for it: its reduce-scatter moves the bytes of an all-reduce."""
    return raw_nbytes("all_reduce" if op == "reduce_scatter" else op, nbytes, world)
