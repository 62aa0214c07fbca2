"""The lanes of a group: endpoints side by side, so that a call is encoded, sent and decoded while another one is.

Each has connections, workers and codec states of its own. Which lane a collective takes follows from the order of the
calls, or the caller says it: it is the same on all ranks, so that each lane sees the same calls in the same order on every
rank. Sends and receives have a worker for each peer anyway, and all of them are the first lane's.

Counters, error monitors and failures are the group's: after a call has failed on one lane, all of them refuse theirs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import CheckpointError
from .endpoint import COLLECTIVES, Call, Endpoint
from .monitor import ErrorMonitor, Monitors
from .streams import Streams
from .traffic import Message, Traffic
from .transport import Transport
from .work import Failure, Work


class Lanes:
    """Runs the calls of a group on an endpoint for each transport, at least one; counts all of them in ``traffic``.

    monitors: by axis, the same on all ranks. The rest: see :class:`Endpoint`.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        traffic: Traffic,
        *,
        device: torch.device,
        checksum: bool = False,
        compare_calls: bool = False,
        after_failure: Callable[[str, Exception], str] | None = None,
        monitors: Mapping[str, ErrorMonitor] | None = None,
    ) -> None:
        self.monitors = Monitors(monitors or {})
        failure = Failure()
        self.endpoints = tuple(
            Endpoint(
                transport,
                traffic,
                f"thinwire-{lane}",
                device=device,
                checksum=checksum,
                compare_calls=compare_calls,
                after_failure=after_failure,
                monitors=self.monitors,
                failure=failure,
            )
            for lane, transport in enumerate(transports)
        )
        self._calls = 0  # that took the next lane, so far
        self._lock = threading.Lock()  # hooks submit from autograd's threads

    def submit(
        self,
        message: Message,
        raw_bytes: float,
        call: Call,
        result: Any,
        queue: str = COLLECTIVES,
        lane: int | None = None,
    ) -> Work:
        """Run a call on a worker of a lane. lane: any number, taken modulo the number of lanes; None: the next."""
        if queue != COLLECTIVES:
            return self.endpoints[0].submit(message, raw_bytes, call, result, queue)
        if lane is None:
            with self._lock:
                lane, self._calls = self._calls, self._calls + 1
        return self.endpoints[lane % len(self.endpoints)].submit(message, raw_bytes, call, result)

    def submit_inline(self, message: Message, raw_bytes: float, call: Call, result: Any) -> Work:
        """Run a collective now, in this thread, see :meth:`Endpoint.submit_inline`; of a single lane."""
        return self.endpoints[0].submit_inline(message, raw_bytes, call, result)

    def dump_states(self) -> bytes:
        """What stateful codecs and monitors remember, for a checkpoint; no calls may be under way."""
        codecs = [endpoint.streams.dump() for endpoint in self.endpoints]
        table = {"codecs": codecs, "calls": self._calls, "monitors": self.monitors.dump()}
        return json.dumps(table).encode()

    def load_states(self, dumped: bytes) -> None:
        """Go on from :meth:`dump_states`: on every rank of the group, or on none.

        Raises CheckpointError, and changes nothing, if it cannot be that, or if codecs have states of another number of
        lanes.
        """
        try:
            table = json.loads(dumped)
            codecs, calls, monitors = list(map(dict, table["codecs"])), table["calls"], table["monitors"]
            if type(calls) is not int or calls < 0:
                raise ValueError(f"calls: {calls!r} is not a number of calls")
            monitors = dict(monitors)
        except (ValueError, KeyError, TypeError) as e:
            raise CheckpointError(f"states of a group: {type(e).__name__}: {e}") from e
        if any(codecs) and len(codecs) != len(self.endpoints):
            raise CheckpointError(
                f"states of a group: codecs have states of {len(codecs)} lane(s), this group has {len(self.endpoints)}; "
                f"make it with GroupOptions(lanes={len(codecs)}), as the one that was saved"
            )
        loaded = [Streams() for _ in self.endpoints]
        for streams, states in zip(loaded, codecs, strict=False):  # none of them has any, or all are here
            streams.load(states)
        self.monitors.load(monitors)
        self._calls = calls
        for endpoint, streams in zip(self.endpoints, loaded, strict=True):
            endpoint.streams = streams

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        for endpoint in self.endpoints:
            endpoint.close()
