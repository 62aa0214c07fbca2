"""What the thinwire groups of a process have sent so far, as plain data for a log, a table or TensorBoard."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from ..collectives.traffic import PASS_THROUGH, Traffic
from ..errors import UnsupportedError

_COUNTS = (
    "calls", "raw_bytes", "wire_bytes", "memory_bytes", "encode_s", "wire_s", "decode_s", "two_phase", "padded",
    "sampled", "nonfinite", "monitor_s",
)  # fmt: skip
_ERRORS = ("relative_error", "max_relative_error")


@dataclass(frozen=True)
class MessageStats:
    """Sums over this rank's messages of one axis, op, role and codec (``pass-through``: sent as they are).

    raw_bytes: what the uncompressed op would have sent; wire_bytes: what was sent; memory_bytes: what went to ranks of
    the same host through shared memory, uncompressed. encode_s and decode_s are CPU
    seconds, wire_s seconds of waiting; of what passes through, wire_s runs from the call to the end of the wait.
    two_phase, padded: exchanges of sizes, and of padded frames, of codecs of variable size.

    Where an error monitor watches: sampled: calls that it has measured, of which ``nonfinite`` had NaN or Inf in what was
    encoded; monitor_s: seconds that this took, waiting for other ranks included. relative_error: of the last sampled
    call (the largest of these, where several kinds of messages are summed up), max_relative_error: of all;
    None: there is none. They are the same on all ranks of a group.
    """

    axis: str
    op: str
    role: str
    codec: str
    calls: int = 0
    raw_bytes: float = 0.0
    wire_bytes: float = 0.0
    memory_bytes: int = 0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    two_phase: int = 0
    padded: int = 0
    sampled: int = 0
    nonfinite: int = 0
    monitor_s: float = 0.0
    relative_error: float | None = None
    max_relative_error: float | None = None

    @property
    def ratio(self) -> float:
        """raw_bytes / wire_bytes; 1 where nothing was sent (a group of one rank, a receiver)."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes and self.raw_bytes else 1.0

    @property
    def compressed(self) -> bool:
        return self.codec != PASS_THROUGH


@dataclass(frozen=True)
class Stats:
    """Messages by axis, op, role and codec, sorted. Control traffic is among them (role ``control``)."""

    messages: tuple[MessageStats, ...] = ()

    @staticmethod
    def of(traffics: Iterable[Traffic]) -> Stats:
        """Sums over the counters of several groups."""
        sums: dict[tuple[str, str, str, str], MessageStats] = {}
        for traffic in traffics:
            for message, entry in traffic.entries().items():
                key = message.axis, message.op, message.role, message.codec
                errors = entry.errors
                found = MessageStats(
                    *key,
                    calls=entry.calls,
                    raw_bytes=entry.raw_bytes,
                    **asdict(entry.tally),
                    sampled=errors.sampled,
                    nonfinite=errors.nonfinite,
                    monitor_s=errors.seconds,
                    relative_error=errors.last,
                    max_relative_error=errors.max,
                )
                sums[key] = found if key not in sums else _add(sums[key], found)
        return Stats(tuple(found for _, found in sorted(sums.items())))

    def by(self, *names: str) -> dict[tuple[str, ...], MessageStats]:
        """Sums over messages with the same ``names``, of axis, op, role, codec; fields that differ are ``*``."""
        sums: dict[tuple[str, ...], MessageStats] = {}
        for message in self.messages:
            key = tuple(getattr(message, name) for name in names)
            sums[key] = message if key not in sums else _add(sums[key], message)
        return sums

    def scalars(self, prefix: str = "thinwire") -> dict[str, float]:
        """Flat numbers for a metrics writer: ``PREFIX/AXIS/OP/NAME``, e.g. ``thinwire/dp/all_reduce/ratio``.

        Errors are among them once one has been measured.
        """
        found: dict[str, float] = {}
        for (axis, op), sums in self.by("axis", "op").items():
            found |= {f"{prefix}/{axis}/{op}/{name}": float(getattr(sums, name)) for name in _COUNTS}
            found[f"{prefix}/{axis}/{op}/ratio"] = sums.ratio
            errors = {name: getattr(sums, name) for name in _ERRORS}
            found |= {f"{prefix}/{axis}/{op}/{name}": e for name, e in errors.items() if e is not None}
        return found

    def as_dicts(self) -> list[dict[str, Any]]:
        """One dict a kind of message, with its ratio: what JSON takes."""
        return [{**asdict(message), "ratio": message.ratio} for message in self.messages]


def _add(a: MessageStats, b: MessageStats) -> MessageStats:
    def join(name: str) -> Any:
        mine, other = getattr(a, name), getattr(b, name)
        if name in _ERRORS:
            return max((error for error in (mine, other) if error is not None), default=None)
        return mine + other if name in _COUNTS else mine if mine == other else "*"

    return MessageStats(*(join(f.name) for f in fields(MessageStats)))


class LiveGroups:
    """The groups of this process that have not been shut down, each with its counters. Holds them weakly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: WeakSet[Any] = WeakSet()

    def add(self, group: Any) -> None:
        with self._lock:
            self._groups.add(group)

    def discard(self, group: Any) -> None:
        with self._lock:
            self._groups.discard(group)

    def traffics(self) -> list[Traffic]:
        with self._lock:
            return [group.traffic for group in self._groups]


LIVE = LiveGroups()


def stats(group: dist.ProcessGroup | None = None) -> Stats:
    """What this rank has sent over a thinwire group (None: over all that are live in this process) since it was made.

    ::

        for name, value in thinwire.stats().scalars().items():
            writer.add_scalar(name, value, step)

    Raises UnsupportedError for a group of another kind (:func:`thinwire.traffic` has what thinwire's functions sent
    over it).
    """
    if group is None:
        return Stats.of(LIVE.traffics())
    traffic = getattr(group, "traffic", None)
    if not isinstance(traffic, Traffic):
        raise UnsupportedError(
            f"stats needs a thinwire group, found {type(group).__name__}; thinwire.traffic(group) has what "
            "thinwire's functions sent over it"
        )
    return Stats.of([traffic])
