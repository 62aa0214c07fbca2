"""How bytes reach the peers: the small interface below every collective, and the meter around it.

A transport moves uint8 tensors whose sizes both ends know. It is asynchronous: every call returns a
:class:`Pending` at once; calls of collective kind are made in the same order on every rank, send and recv
in the same order on both ends of a pair.

Of torch's groups: :mod:`.torch_transport`; of MPI: :mod:`thinwire.mpi.transport`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .monitor import IDLE, Watch
from .streams import Ends, Streams
from .traffic import Tally


class Pending(Protocol):
    """A transfer that has been started. The buffers belong to it until ``wait`` returns."""

    def wait(self) -> None:
        """Return when the transfer is done; raise PeerError if a peer was lost or the time is up."""


class Exchange(Pending, Protocol):
    """A transfer from every peer."""

    def wait_for(self, peer: int) -> None:
        """As ``wait``, for what comes from rank ``peer`` alone."""


class Transport(Protocol):
    """Bytes to peers. ``rank`` and ``size`` are those of the group."""

    rank: int
    size: int

    def all_to_all(
        self,
        out: Tensor,
        inp: Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        *,
        in_rounds: bool = False,
    ) -> Exchange:
        """Send ``in_splits[p]`` bytes of inp to each rank p, receive ``out_splits[p]`` bytes from it.

        in_rounds, the same on all ranks: pairs take turns where messages are large, see :mod:`~thinwire.collectives.rounds`.
        """

    def all_gather(self, out: Tensor, inp: Tensor) -> Pending:
        """``out`` (size * n bytes) becomes every rank's ``inp`` (n bytes, the same n everywhere)."""

    def broadcast(self, buffer: Tensor, src: int) -> Pending:
        """``buffer`` becomes that of rank ``src``."""

    def send(self, buffer: Tensor, dst: int, tag: int = 0) -> Pending:
        """Send ``buffer`` to rank ``dst``. On the CPU, only a receive with the same tag (0 to 15) takes it."""

    def recv(self, buffer: Tensor, src: int, tag: int = 0) -> Pending:
        """Receive exactly ``buffer.numel()`` bytes from rank ``src``."""


class Metered:
    """A transport for one call of a collective: it counts the bytes sent and the time waited.

    ends: what stateful codecs remember of such calls; None: nothing, each call begins anew. watch: the error monitor of the
    call, which says whether it is encoded with its codec at all; None: nobody watches. checksum: the frames that are sent
    carry a checksum of their payload.
    """

    def __init__(
        self,
        inner: Transport,
        tally: Tally,
        ends: Ends | None = None,
        watch: Watch | None = None,
        *,
        checksum: bool = False,
    ) -> None:
        self.inner = inner
        self.tally = tally
        self.checksum = checksum
        self.rank = inner.rank
        self.size = inner.size
        self.ends = ends if ends is not None else Ends(Streams(), inner.rank, "")
        self.watch = watch if watch is not None else IDLE

    def all_to_all(
        self,
        out: Tensor,
        inp: Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        *,
        in_rounds: bool = False,
    ) -> Exchange:
        self.tally.wire_bytes += sum(in_splits) - in_splits[self.rank]
        exchange = self.inner.all_to_all(out, inp, out_splits, in_splits, in_rounds=in_rounds)
        return _TimedExchange(exchange, self.tally)

    def all_gather(self, out: Tensor, inp: Tensor) -> Pending:
        self.tally.wire_bytes += inp.numel() * (self.size - 1)
        return self._timed(self.inner.all_gather(out, inp))

    def broadcast(self, buffer: Tensor, src: int) -> Pending:
        # A tree: every rank but the root receives the buffer once; who sends it is the transport's choice.
        self.tally.wire_bytes += buffer.numel() * (self.size - 1) // self.size
        return self._timed(self.inner.broadcast(buffer, src))

    def send(self, buffer: Tensor, dst: int, tag: int = 0) -> Pending:
        self.tally.wire_bytes += buffer.numel()
        return self._timed(self.inner.send(buffer, dst, tag))

    def recv(self, buffer: Tensor, src: int, tag: int = 0) -> Pending:
        return self._timed(self.inner.recv(buffer, src, tag))

    def _timed(self, pending: Pending) -> Pending:
        return _TimedPending(pending, self.tally)


class _TimedPending:
    def __init__(self, pending: Pending, tally: Tally) -> None:
        self._pending = pending
        self._tally = tally

    def wait(self) -> None:
        with self._tally.waiting():
            self._pending.wait()


class _TimedExchange(_TimedPending):
    def __init__(self, exchange: Exchange, tally: Tally) -> None:
        super().__init__(exchange, tally)
        self._exchange = exchange

    def wait_for(self, peer: int) -> None:
        with self._tally.waiting():
            self._exchange.wait_for(peer)
