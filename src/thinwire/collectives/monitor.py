"""How much encoding loses: one message in many is measured by the rank that encodes it, and all ranks learn the result.

A *stream* is all messages of one axis, op, role, codec and dtype; of send and recv, of one peer as well. Both ends of a
stream count its calls alike, so they agree on which ones are sampled. After a sampled call the ranks exchange the squares of
what they lost and of what they encoded: each computes the same relative L2 error from the same numbers, so all of
them reach the limit in the same call, and go on without loss from the next one. No rank can do so alone.

Calls have their turns in the order in which they were made. Where calls of a stream run side by side, those after a sampled
one wait until it has been judged, if there is a limit: what is decided does not depend on which of them is faster.
"""

from __future__ import annotations

import json
import logging
import math
import struct
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .. import wire
from ..codecs import parse_compressor
from ..codecs.base import Codec
from ..codecs.none import NoneCodec
from ..errors import CheckpointError, SpecError
from .options import derive_seed
from .traffic import PASS_THROUGH, Message

# Not Python's warnings: a filter may turn those into exceptions, and a rank that raises alone inside of a collective
# leaves the others waiting.
_log = logging.getLogger("thinwire")
Action = Literal["warn", "exact"]
EXACT = NoneCodec()
_STAGES = 4  # encodings of one call at most: an all-reduce has the senders', one for each lossy level, and the owner's
_ROW = struct.Struct(f"<{2 * _STAGES + 1}d")
ROW_NBYTES = _ROW.size
"""Size of what a rank tells the others of a sampled call."""


@dataclass(frozen=True)
class ErrorMonitor:
    """Measure what encoding loses, and do something about it.

    every: one call of so many of each stream is sampled, the first of all among them. Of such a call a rank decodes one of
    the frames that it has encoded; the error is the L2 norm of what was lost over that of what was encoded, over all
    ranks. With error feedback that is of the compensated message, the residual included. limit: a relative error above
    it is logged as a warning (once, until it has been below), None: none is. action: ``warn`` only, or ``exact``: from the
    next call on the stream's messages travel as they are, on all ranks, for the rest of the run.

    Raises SpecError for a value that cannot be.
    """

    every: int = 50
    limit: float | None = None
    action: Action = "warn"

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise SpecError(f"every = {self.every!r}: a number of calls, 1 or more, is needed")
        number = isinstance(self.limit, int | float) and not isinstance(self.limit, bool)
        if self.limit is not None and not (number and 0 < self.limit < math.inf):
            raise SpecError(f"limit = {self.limit!r}: a relative error above 0, such as 0.1, is needed")
        if self.action not in get_args(Action):
            raise SpecError(f"action = {self.action!r}: must be one of {', '.join(get_args(Action))}")
        if self.action == "exact" and self.limit is None:
            raise SpecError("action = 'exact' needs a limit")

    def __str__(self) -> str:
        return f"every={self.every},limit={self.limit},action={self.action}"


class _Judged:
    """A call that is due to be sampled. over: set when it is; exact: whether the stream travels as it is from then on.

    before: the one before it, as long as it is not over.
    """

    def __init__(self, before: _Judged | None) -> None:
        self.over = threading.Event()
        self.exact = False
        self.before = before


@dataclass
class _Stream:
    """What both ends of a stream know: its calls so far, whether it travels as it is, whether the last error was high.

    judged: the last call that was due to be sampled, if there is a limit.
    """

    calls: int = 0
    exact: bool = False
    above: bool = False
    judged: _Judged | None = None


class Turn:
    """A call's place among those of its stream. sample: the number of the sample that it is due for; None: for none."""

    def __init__(
        self,
        name: str = "",
        monitor: ErrorMonitor | None = None,
        stream: _Stream | None = None,
        sample: int | None = None,
    ) -> None:
        self._name, self._monitor, self._stream, self._sample = name, monitor, stream, sample
        self._exact = stream is not None and stream.exact
        self._before: _Judged | None = None
        self._mine: _Judged | None = None
        if stream is not None and monitor is not None and monitor.limit is not None:
            self._before = stream.judged
            if sample is not None:
                self._mine = stream.judged = _Judged(stream.judged)

    def watch(self) -> Watch:
        """When the call runs: what is done about it. Waits until the last sampled call before it is over."""
        if self._stream is None:
            return IDLE
        if self._before is not None:
            self._before.over.wait()
            # Not the stream's: a later call may have been judged before this one runs.
            self._exact = self._before.exact
        return Watch(
            self._name, self._monitor, self._stream, None if self._exact else self._sample, exact=self._exact
        )

    def end(self) -> None:
        """The call is over, or it has failed."""
        if self._mine is not None and self._stream is not None:
            self._mine.exact, self._mine.before = self._stream.exact, None
            self._mine.over.set()


class Watch:
    """One call of a stream. exact: the stream has passed its limit. sampled: this call is measured.

    error: after a sampled call, the relative error; None: a rank encoded NaN or Inf, or all encoded zeros.
    seconds: what measuring took, CPU time, and waiting for the other ranks.
    """

    def __init__(
        self,
        name: str = "",
        monitor: ErrorMonitor | None = None,
        stream: _Stream | None = None,
        sample: int | None = None,
        *,
        exact: bool = False,
    ) -> None:
        self.exact = exact
        self.sampled = sample is not None
        self.error: float | None = None
        self.nonfinite = False
        self.seconds = 0.0
        self._name, self._monitor, self._stream, self._sample = name, monitor, stream, sample or 0
        self._stages: list[tuple[float, float]] = []  # squares of what was lost, and of what was encoded
        self._norm = 0.0

    def codec(self, codec: Codec) -> Codec:
        """What the messages of this call are encoded with: ``codec``, or ``none`` after the limit was passed."""
        return EXACT if self.exact else codec

    # What a collective tells, in this order, of each of its encodings.

    def choose(self, codec: Codec, values: Sequence[Tensor | None]) -> int | None:
        """Before encoding: which of the values is measured. None: none is. Keeps its norm."""
        if not self.sampled or codec.lossless:
            return None
        able = [index for index, value in enumerate(values) if value is not None and value.numel()]
        if not able:
            self._stages.append((0.0, 0.0))
            return None
        chosen = able[self._sample % len(able)]
        value = values[chosen]
        assert value is not None
        self.before(value)
        return chosen

    def after_frame(self, codec: Codec, frame: Tensor, value: Tensor, residual: Tensor | None) -> None:
        """After encoding the chosen value, which its residual may have replaced."""
        start = time.thread_time()
        if residual is None:
            decoded = torch.empty_like(value)
            wire.unpack(codec, frame, decoded)
            residual = torch.sub(value.float(), decoded.float())
        self.seconds += time.thread_time() - start
        self.after(residual)

    def before(self, value: Tensor) -> None:
        """Keep the norm of what is about to be encoded; for compressors without frames."""
        start = time.thread_time()
        self._norm = _norm(value)
        self.seconds += time.thread_time() - start

    def after(self, lost: Tensor) -> None:
        """What its encoding has lost."""
        start = time.thread_time()
        self._stages.append((_norm(lost), self._norm))
        self.seconds += time.thread_time() - start

    # What the ranks tell each other.

    def row(self, device: torch.device) -> Tensor:
        """This rank's numbers, as ``ROW_NBYTES`` bytes."""
        numbers = [0.0] * (2 * _STAGES + 1)
        for index, (lost, norm) in enumerate(self._stages[:_STAGES]):
            if not math.isfinite(norm):
                numbers[-1] = 1.0
            elif not math.isfinite(lost):
                numbers[2 * index : 2 * index + 2] = math.inf, norm * norm
            else:
                numbers[2 * index : 2 * index + 2] = lost * lost, norm * norm
        return torch.frombuffer(bytearray(_ROW.pack(*numbers)), dtype=torch.uint8).to(device)

    def conclude(self, rows: Tensor, *, speak: bool) -> None:
        """Compute the error from the rows of the ranks that have encoded, one after the other, and act on it.

        speak: this rank is the one that logs for all.
        """
        raw = bytes(rows.tolist())
        every = [_ROW.unpack_from(raw, at) for at in range(0, len(raw), ROW_NBYTES)]
        self.nonfinite = any(row[-1] for row in every)
        if not self.nonfinite:
            found = [_ratio(every, 2 * stage) for stage in range(_STAGES)]
            self.error = max((error for error in found if error is not None), default=None)
        self._act(speak)

    def _act(self, speak: bool) -> None:
        monitor, stream = self._monitor, self._stream
        assert monitor is not None
        assert stream is not None
        if monitor.limit is None or self.error is None:
            return
        above = self.error > monitor.limit
        stream.exact = above and monitor.action == "exact"
        if above and not stream.above and speak:
            then = (
                "from now on these messages travel as they are, on all ranks"
                if stream.exact
                else "use a codec that keeps more, error feedback, or a higher limit"
            )
            _log.warning(
                "%s: encoding loses %.3g of the message (relative L2 error, call %d), above the monitor's limit %g; %s",
                self._name,
                self.error,
                stream.calls,
                monitor.limit,
                then,
            )
        stream.above = above


IDLE = Watch()
"""Of a call that nobody watches."""


class Monitors:
    """The monitors of a group by axis, and what they know of the group's streams."""

    def __init__(self, by_axis: Mapping[str, ErrorMonitor]) -> None:
        self._by_axis = dict(by_axis)
        self._streams: dict[str, _Stream] = {}
        self._lossless: dict[str, bool] = {}
        self._lock = threading.Lock()

    def turn(self, message: Message, queue: str) -> Turn:
        """The next call of a message's stream, in the order of calls, the same on all ranks.

        queue: the worker's; it tells the peers of sends and receives apart.
        """
        monitor = self._by_axis.get(message.axis)
        if monitor is None or message.codec == PASS_THROUGH or self._is_lossless(message.codec):
            return Turn()
        peer = message.op in ("send", "recv")
        # The receiver may not know the role.
        kind = f"{message.axis} {'send' if peer else f'{message.op} {message.role}'} {message.codec} {message.dtype}"
        name = f"axis {message.axis}, {message.op} of role {message.role} as {message.codec}, {message.dtype}"
        with self._lock:
            stream = self._streams.setdefault(f"{kind} {queue}", _Stream())
            window, at = divmod(stream.calls, monitor.every)
            stream.calls += 1
            # Not each time the same call: a step has the same messages in the same order, and all should have their turn.
            due = derive_seed(window, zlib.crc32(kind.encode())) % monitor.every if window else 0
            return Turn(name, monitor, stream, window if at == due else None)

    def release(self) -> None:
        """Calls have failed: those that wait for them go on, and fail, too."""
        with self._lock:
            for stream in self._streams.values():
                judged = stream.judged
                while judged is not None:
                    judged.over.set()
                    judged = judged.before

    def _is_lossless(self, codec: str) -> bool:
        found = self._lossless.get(codec)
        if found is None:
            found = self._lossless[codec] = parse_compressor(codec).lossless
        return found

    def dump(self) -> dict[str, Any]:
        """What is known of all streams, of JSON's types, for a checkpoint."""
        return {name: [s.calls, s.exact, s.above] for name, s in sorted(self._streams.items())}

    def load(self, dumped: Mapping[str, Any]) -> None:
        """Go on from what :meth:`dump` gave. Raises CheckpointError, and changes nothing, if it cannot be that."""
        loaded: dict[str, _Stream] = {}
        for name, entry in dumped.items():
            if not (
                isinstance(entry, list) and list(map(type, entry)) == [int, bool, bool] and entry[0] >= 0
            ):
                raise CheckpointError(f"state of the monitor of {name}: {json.dumps(entry)} cannot be one")
            loaded[name] = _Stream(*entry)
        self._streams = loaded


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) if x.numel() else 0.0


def _ratio(rows: Sequence[tuple[float, ...]], at: int) -> float | None:
    """The relative error of one encoding over all ranks; None: nobody has encoded anything but zeros."""
    lost, norm = (sum(row[at + i] for row in rows) for i in range(2))
    if norm == 0:
        return None
    # Finite values that came back as Inf: a number all the same, since JSON has none for it.
    return min(math.sqrt(lost / norm), sys.float_info.max)
