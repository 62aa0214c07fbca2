"""A rank's end of one group: its transport, its worker threads, its counters.

Collectives share one worker, so that their order is the order of the calls on every rank. Each (peer,
direction) of send and recv has a worker of its own: a receive that waits must not hold up a send.

Before the first collective of a kind (op, codec, dtype, size) the ranks compare what they are about to do: bytes
of another size than expected would end the process inside the transport, without a name. Where the order of kinds that
are all known may differ between ranks, ``compare_calls`` lets them compare before each one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..errors import MismatchError, PeerError, WireError
from .streams import Ends, Streams
from .traffic import PASS_THROUGH, Message, Tally, Traffic, raw_nbytes
from .transport import Metered, Transport
from .work import Work, Worker, done, failed

Call = Callable[[Metered], None]
COLLECTIVES = "collectives"
_CPU = torch.device("cpu")
_TEXT_NBYTES = 160


class Endpoint:
    """Runs collectives over ``transport`` and counts them in ``traffic``; ``streams``: what
    stateful codecs remember.

    device: where the transport's buffers live. checksum: payloads that are sent carry one. compare_calls: see above.
    after_failure: is told of a call that failed, in words, and of what it raised; what it returns is added to the error.
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
    ) -> None:
        self.transport = transport
        self._after_failure = after_failure
        self._checksum = checksum
        self._compare_calls = compare_calls
        self.traffic = traffic if traffic is not None else Traffic()
        self.streams = Streams()
        self._name = name
        self._device = device
        self._agreed: set[str] = set()  # used by the collectives' worker only
        self._workers: dict[str, Worker] = {}
        self._failed: Exception | None = None  # of an inline call: later ones are refused, as a worker does
        self._lock = threading.Lock()  # hooks submit from autograd's threads

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    def run(self, message: Message, raw_bytes: float, call: Call) -> None:
        """Run a call now, in this thread, and count it."""
        tally = Tally()
        ends = Ends.of(self.streams, self.rank, message)
        call(Metered(self.transport, tally, ends, checksum=self._checksum))
        self.traffic.add(message, raw_bytes, tally)

    def submit_inline(self, message: Message, raw_bytes: float, call: Call, result: Any) -> Work:
        """Run a collective now, in this thread, for callers that wait at once: no hand-over to a worker and back.

        An endpoint's collectives run all inline or all on the worker: their order must be that of the calls.
        """
        if self._failed is not None:
            return failed(result, self._failed)
        try:
            with torch.no_grad():
                self._run_named(message, raw_bytes, call, collective=True)
        except Exception as e:
            self._failed = e
            return failed(result, e)
        return done(result)

    def submit(
        self, message: Message, raw_bytes: float, call: Call, result: Any, queue: str = COLLECTIVES
    ) -> Work:
        """Run a call on the worker of ``queue``; the Work completes with ``result``."""
        with self._lock:
            worker = self._workers.get(queue)
            if worker is None:
                worker = self._workers[queue] = Worker(f"{self._name}/{queue}")
            collective = queue == COLLECTIVES
            return worker.submit(lambda: self._run_named(message, raw_bytes, call, collective), result)

    def _run_named(self, message: Message, raw_bytes: float, call: Call, collective: bool) -> None:
        """Run a call now; what it raises says which call it was."""
        try:
            if collective:
                self._compare(message)
            self.run(message, raw_bytes, call)
        except Exception as e:
            found = "" if self._after_failure is None else self._after_failure(str(message), e)
            if isinstance(e, (PeerError, WireError)):
                raise type(e)(f"rank {self.rank}: {message}: {e}{found}") from e
            raise

    def _compare(self, message: Message) -> None:
        """Raise MismatchError on every rank if one is about to run something else."""
        text = str(message)
        if message.op == "all_to_all":  # only its sizes may differ between ranks
            text = text.rpartition(", ")[0]
        if self.size == 1 or (text in self._agreed and not self._compare_calls):
            return
        raw = text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES)
        mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self._device)
        every = mine.new_empty(self.size * _TEXT_NBYTES)
        tally = Tally()
        Metered(self.transport, tally).all_gather(every, mine).wait()
        control = Message(message.axis, "all_gather", "control", PASS_THROUGH, "uint8", every.numel())
        self.traffic.add(control, raw_nbytes("all_gather", every.numel(), self.size), tally)
        texts = [
            bytes(part.tolist()).decode(errors="replace").rstrip() for part in every.view(self.size, -1).cpu()
        ]
        if len(set(texts)) > 1:
            lines = "\n".join(f"  rank {rank}: {other}" for rank, other in enumerate(texts))
            raise MismatchError(f"the ranks of a group run different collectives at the same time:\n{lines}")
        self._agreed.add(text)

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        with self._lock:
            workers = list(self._workers.values())
            self._workers.clear()
        for worker in workers:
            worker.close()
