"""A rank's end of one lane of a group: its transport, its worker threads, what its codecs remember.

Collectives share one worker, so that their order is the order of the calls on every rank. Each (peer,
direction) of send and recv has a worker of its own: a receive that waits must not hold up a send.

Before the first collective of a kind (op, codec, dtype, size) the ranks compare what they are about to do: bytes
of another size than expected would end the process inside the transport, without a name. Where the order of kinds that
are all known may differ between ranks, ``compare_calls`` lets them compare before each one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import MismatchError, PeerError, WireError
from .monitor import EXACT, Monitors, Turn, Watch
from .streams import Ends, Streams
from .traffic import PASS_THROUGH, Message, Tally, Traffic, raw_nbytes
from .transport import Metered, Transport
from .work import Failure, Work, Worker, done, failed

Call = Callable[[Metered], None]
COLLECTIVES = "collectives"
_CPU = torch.device("cpu")
_TEXT_NBYTES = 160


class Endpoint:
    """Runs collectives over ``transport`` and counts them in ``traffic``; ``streams``: what
    stateful codecs remember; ``monitors``: what is known of the errors of lossy ones.

    device: where the transport's buffers live. checksum: payloads that are sent carry one. compare_calls: see above.
    after_failure: is told of a call that failed, in words, and of what it raised; what it returns is added to the error.
    failure: of the collectives. The lanes of a group share traffic, monitors and failure.
    """

    def __init__(
        self,
        transport: Transport,
        traffic: Traffic | None = None,
        name: str = "thinwire",
        *,
        device: torch.device = _CPU,
        checksum: bool = False,
        compare_calls: bool = False,
        after_failure: Callable[[str, Exception], str] | None = None,
        monitors: Monitors | None = None,
        failure: Failure | None = None,
    ) -> None:
        self.transport = transport
        self._after_failure = after_failure
        self._checksum = checksum
        self._compare_calls = compare_calls
        self.traffic = traffic if traffic is not None else Traffic()
        self.streams = Streams()
        self.monitors = monitors if monitors is not None else Monitors({})
        self._name = name
        self._device = device
        self._agreed: set[str] = set()  # used by the collectives' worker only
        self._workers: dict[str, Worker] = {}
        self._failure = failure if failure is not None else Failure()
        self._lock = threading.Lock()  # hooks submit from autograd's threads

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    def run(
        self,
        message: Message,
        raw_bytes: float,
        call: Call,
        queue: str = COLLECTIVES,
        turn: Turn | None = None,
    ) -> None:
        """Run a call now, in this thread, and count it. turn: of the monitors; None: it is the next one's."""
        turn = turn if turn is not None else self.monitors.turn(message, queue)
        try:
            tally, watch = Tally(), turn.watch()
            ends = Ends.of(self.streams, self.rank, message)
            call(Metered(self.transport, tally, ends, watch, checksum=self._checksum))
            self.traffic.add(replace(message, codec=str(EXACT)) if watch.exact else message, raw_bytes, tally)
            if watch.sampled:
                if queue == COLLECTIVES:  # sends and receives have told each other
                    self._conclude(message, watch)
                self.traffic.add_error(message, watch.error, nonfinite=watch.nonfinite, seconds=watch.seconds)
        finally:
            turn.end()

    def submit_inline(self, message: Message, raw_bytes: float, call: Call, result: Any) -> Work:
        """Run a collective now, in this thread, for callers that wait at once: no hand-over to a worker and back.

        An endpoint's collectives run all inline or all on the worker: their order must be that of the calls.
        """
        if self._failure.error is not None:  # as a worker does
            return failed(result, self._failure.error)
        try:
            with torch.no_grad():
                self._run_named(message, raw_bytes, call)
        except Exception as e:
            return failed(result, e)
        return done(result)

    def submit(
        self, message: Message, raw_bytes: float, call: Call, result: Any, queue: str = COLLECTIVES
    ) -> Work:
        """Run a call on the worker of ``queue``; the Work completes with ``result``."""
        with self._lock:
            worker = self._workers.get(queue)
            if worker is None:
                failure = self._failure if queue == COLLECTIVES else None
                worker = self._workers[queue] = Worker(f"{self._name}/{queue}", failure)
            turn = self.monitors.turn(message, queue)  # here: the order of the calls, on whatever lane
            return worker.submit(lambda: self._run_named(message, raw_bytes, call, queue, turn), result)

    def _run_named(
        self,
        message: Message,
        raw_bytes: float,
        call: Call,
        queue: str = COLLECTIVES,
        turn: Turn | None = None,
    ) -> None:
        """Run a call now; what it raises says which call it was."""
        try:
            if queue == COLLECTIVES:
                self._compare(message)
            self.run(message, raw_bytes, call, queue, turn)
        except Exception as e:
            error = self._named(message, e)
            if queue == COLLECTIVES:
                self._failure.note(error)
                self.monitors.release()
            if error is e:
                raise
            raise error from e

    def _named(self, message: Message, error: Exception) -> Exception:
        """What a call that has failed raises."""
        if isinstance(self._failure.error, MismatchError) and isinstance(error, PeerError):
            return self._failure.error  # the lane that found it has closed the connections of this one
        found = "" if self._after_failure is None else self._after_failure(str(message), error)
        if isinstance(error, (PeerError, WireError)):
            return type(error)(f"rank {self.rank}: {message}: {error}{found}")
        return error

    def _compare(self, message: Message) -> None:
        """Raise MismatchError on every rank if one is about to run something else."""
        text = str(message)
        if message.op == "all_to_all":  # only its sizes may differ between ranks
            text = text.rpartition(", ")[0]
        if self.size == 1 or (text in self._agreed and not self._compare_calls):
            return
        raw = text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES)
        mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self._device)
        every, _ = self._gather_control(message.axis, mine)
        texts = [
            bytes(part.tolist()).decode(errors="replace").rstrip() for part in every.view(self.size, -1).cpu()
        ]
        if len(set(texts)) > 1:
            lines = "\n".join(f"  rank {rank}: {other}" for rank, other in enumerate(texts))
            error = MismatchError(
                f"the ranks of a group run different collectives at the same time:\n{lines}"
            )
            self._failure.note(error)
            # When one of them closes the other lanes, all of them know why.
            with suppress(PeerError):
                self._gather_control(message.axis, mine)
            raise error
        self._agreed.add(text)

    def _conclude(self, message: Message, watch: Watch) -> None:
        """Let all ranks know what each of them has lost in a sampled collective."""
        rows = watch.row(self._device)
        if self.size > 1:
            rows, waited = self._gather_control(message.axis, rows)
            watch.seconds += waited
        watch.conclude(rows.cpu(), speak=self.rank == 0)

    def _gather_control(self, axis: str, mine: Tensor) -> tuple[Tensor, float]:
        """Every rank's few bytes, one after the other, and the seconds of waiting for them; counted as control traffic."""
        every, tally = mine.new_empty(self.size * mine.numel()), Tally()
        Metered(self.transport, tally).all_gather(every, mine).wait()
        control = Message(axis, "all_gather", "control", PASS_THROUGH, "uint8", every.numel())
        self.traffic.add(control, raw_nbytes("all_gather", every.numel(), self.size), tally)
        return every, tally.wire_s

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        with self._lock:
            workers = list(self._workers.values())
            self._workers.clear()
        for worker in workers:
            worker.close()
