"""MPI's own collectives as a ``torch.distributed`` group: what passes through a thinwire group with ``backend="mpi"``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives.work import Joined, Work
from ..errors import UnsupportedError
from . import reductions
from .buffers import Staged, memory, pieces
from .communicator import Communicator
from .operation import Operation

_COUNT = (1 << 31) - 1


class MpiWork(Work):
    """The handle of an operation. Who waits makes it go on; futures are completed by the thread that makes progress."""

    def __init__(self, operation: Operation, result: Any, source: Callable[[], int] | None = None) -> None:
        super().__init__(result)
        self._operation = operation
        self._source = source
        operation.on_over(self._finish_with)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._operation.wait(timeout or None)  # PyTorch's own callers mean "none" by a time-out of zero
        return True

    def _finish_with(self, error: Exception | None) -> None:
        self._finish(error)

    def _source_rank(self) -> int:
        if self._source is None:
            raise UnsupportedError("only a receive from any rank has a source that is not known before")
        return self._source()


class MpiGroup(dist.ProcessGroup):
    """The operations of a process group by MPI. Not for users: it is the inner group of a thinwire group.

    Reductions of 16-bit floats are described in :mod:`.reductions`; all others are MPI's. Raises UnsupportedError for what
    MPI cannot reduce, and for messages of more than 2^31 - 1 values, where the operation cannot send them in pieces.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        self.communicator = communicator
        self._in_place = communicator.process.mpi.IN_PLACE

    def rank(self) -> int:
        return self.communicator.rank

    def size(self) -> int:
        return self.communicator.size

    def getBackendName(self) -> str:
        return "mpi"

    # Reductions.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        (x,) = tensors
        op, size = _op(opts, dist.AllreduceOptions), self.size()
        kind, mpi_op = reductions.reduced(x.dtype, op)
        staged = Staged(x, reads=True, writes=True)

        def finish() -> None:
            reductions.divide(staged.flat, op, size)
            staged.finish()

        calls = [(self._in_place, [memory(p), p.numel(), kind], mpi_op) for p in pieces(staged.flat)]
        return self._start("Iallreduce", calls, staged, finish, tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return Joined([self.allreduce([x], opts) for x in tensors], tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        (x,) = tensors
        opts = opts if opts is not None else dist.ReduceOptions()
        op, root, size = opts.reduceOp, opts.rootRank, self.size()
        kind, mpi_op = reductions.reduced(x.dtype, op)
        mine = self.rank() == root
        staged = Staged(x, reads=True, writes=mine)

        def finish() -> None:
            if mine:
                reductions.divide(staged.flat, op, size)
                staged.finish()

        def call(p: Tensor) -> tuple[Any, ...]:
            buffer = [memory(p), p.numel(), kind]
            return (self._in_place if mine else buffer, buffer if mine else None, mpi_op, root)

        return self._start("Ireduce", [call(p) for p in pieces(staged.flat)], staged, finish, tensors)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        n = output.numel()
        return self._reduce_scatter([output], input, [n] * self.size(), opts, [output])

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        parts = inputs[0]
        flat = torch.cat([p.reshape(-1) for p in parts])
        return self._reduce_scatter(outputs, flat, [p.numel() for p in parts], opts, outputs)

    def _reduce_scatter(
        self, outputs: list[Tensor], whole: Tensor, counts: Sequence[int], opts: Any, result: Any
    ) -> dist.Work:
        op, size = _op(opts, dist.ReduceScatterOptions), self.size()
        _countable("reduce_scatter", whole)
        kind, mpi_op = reductions.reduced(whole.dtype, op)
        source = Staged(whole, reads=True, writes=False)
        target = Staged(outputs[0], reads=False, writes=True)

        def finish() -> None:
            reductions.divide(target.flat, op, size)
            target.finish()

        call = (
            [memory(source.flat), source.flat.numel(), kind],
            [memory(target.flat), target.flat.numel(), kind],
            list(counts),
            mpi_op,
        )
        return self._start("Ireduce_scatter", [call], (source, target), finish, result, opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return Joined([self._reduce_scatter_base(out, inp, opts) for out, inp in pairs], outputs)

    # Messages that are moved as they are.

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        target = Staged(output, reads=False, writes=True)
        return self._all_gather(target.flat, input, [input.numel()] * self.size(), target.finish, [output])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        outs = outputs[0]
        counts = [o.numel() for o in outs]
        flat = self._host(inputs[0], sum(counts))
        return self._all_gather(flat, inputs[0], counts, lambda: _deal(flat, outs), outputs)

    def _all_gather(
        self, flat: Tensor, inp: Tensor, counts: Sequence[int], finish: Callable[[], None], result: Any
    ) -> dist.Work:
        _countable("all_gather", flat)
        source, kind = Staged(inp, reads=True, writes=False), reductions.moved(inp.dtype)
        target = [memory(flat), (list(counts), _starts(counts)), kind]
        call = ([memory(source.flat), source.flat.numel(), kind], target)
        return self._start("Iallgatherv", [call], (source, flat), finish, result)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return Joined([self._allgather_base(out, inp, opts) for out, inp in pairs], outputs)

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> dist.Work:
        _countable("all_to_all", output)
        _countable("all_to_all", input)
        source, target = Staged(input, reads=True, writes=False), Staged(output, reads=False, writes=True)
        kind = reductions.moved(input.dtype)
        send, recv = _counts(input, in_splits, self.size()), _counts(output, out_splits, self.size())
        call = (
            [memory(source.flat), (send, _starts(send)), kind],
            [memory(target.flat), (recv, _starts(recv)), kind],
        )
        return self._start("Ialltoallv", [call], (source, target), target.finish, [output])

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        (x,) = tensors
        root = (opts if opts is not None else dist.BroadcastOptions()).rootRank
        staged = Staged(x, reads=self.rank() == root, writes=self.rank() != root)
        kind = reductions.moved(x.dtype)
        calls = [([memory(p), p.numel(), kind], root) for p in pieces(staged.flat)]
        return self._start("Ibcast", calls, staged, staged.finish, tensors, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        root = (opts if opts is not None else dist.GatherOptions()).rootRank
        source, kind = Staged(inputs[0], reads=True, writes=False), reductions.moved(inputs[0].dtype)
        mine = [memory(source.flat), source.flat.numel(), kind]
        if self.rank() != root:
            return self._start("Igatherv", [(mine, None, root)], source, None, outputs)
        outs = outputs[0]
        counts = [o.numel() for o in outs]
        flat = self._host(inputs[0], sum(counts))
        _countable("gather", flat)
        target = [memory(flat), (counts, _starts(counts)), kind]
        finish = lambda: _deal(flat, outs)  # noqa: E731
        return self._start("Igatherv", [(mine, target, root)], (source, flat), finish, outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:  # type: ignore[override]
        root = (opts if opts is not None else dist.ScatterOptions()).rootRank
        target, kind = Staged(outputs[0], reads=False, writes=True), reductions.moved(outputs[0].dtype)
        mine = [memory(target.flat), target.flat.numel(), kind]
        if self.rank() != root:
            return self._start("Iscatterv", [(None, mine, root)], target, target.finish, outputs)
        parts = inputs[0]
        counts = [p.numel() for p in parts]
        whole = torch.cat([p.reshape(-1) for p in parts])
        _countable("scatter", whole)
        source = Staged(whole, reads=True, writes=False)
        call = ([memory(source.flat), (counts, _starts(counts)), kind], mine, root)
        return self._start("Iscatterv", [call], (source, target), target.finish, outputs)

    # Point to point, in the order of the calls per (peer, tag).

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        flat = Staged(tensors[0], reads=True, writes=False).flat
        return MpiWork(self.communicator.send(flat, dst, tag), tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        staged = Staged(tensors[0], reads=False, writes=True)
        return MpiWork(self.communicator.recv(staged.flat, src, tag, finish=staged.finish), tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        staged = Staged(tensors[0], reads=False, writes=True)
        operation = self.communicator.recv(staged.flat, None, tag, finish=staged.finish)
        return MpiWork(operation, tensors, lambda: operation.source)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._start("Ibarrier", [()], None, None, [])

    # The end.

    def shutdown(self) -> None:
        self.communicator.free()

    def abort(self) -> None:
        self.communicator.give_up("its connections were closed")

    def _start(
        self,
        name: str,
        calls: Sequence[tuple[Any, ...]],
        keep: Any,
        finish: Callable[[], None] | None,
        result: Any,
        opts: Any = None,
    ) -> dist.Work:
        # Only PyTorch's own synchronous calls say so, and wait before they return.
        awaited = not getattr(opts, "asyncOp", True)
        operation = self.communicator.collective(name, calls, keep=keep, finish=finish, awaited=awaited)
        return MpiWork(operation, result)

    def _host(self, like: Tensor, numel: int) -> Tensor:
        """Memory that MPI can write to, for values that are dealt out afterwards."""
        return Staged(like.new_empty(numel), reads=False, writes=True).flat


def _op(opts: Any, default: Callable[[], Any]) -> Any:
    return (opts if opts is not None else default()).reduceOp


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]


def _counts(x: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Values for each rank: splits are rows of the first dimension; none: equal parts."""
    if not splits:
        return [x.numel() // size] * size
    row = x.numel() // x.shape[0] if x.shape[0] else 0
    return [n * row for n in splits]


def _deal(flat: Tensor, outs: Sequence[Tensor]) -> None:
    for out, part in zip(outs, torch.split(flat, [o.numel() for o in outs]), strict=True):
        out.detach().copy_(part.view_as(out))


def _countable(op: str, x: Tensor) -> None:
    if x.numel() > _COUNT:
        raise UnsupportedError(
            f"backend mpi: {op} of {x.numel()} values; MPI counts to {_COUNT} in one call, so send them in parts"
        )
