"""Groups whose receivers wait as long as a link of a given rate would take: a stand-in where there is no root.

No packet is shaped. Every op waits, after it is done, until its bytes would have come over the links of
:class:`~thinwire.lab.net.PacedNetwork`, which all ranks of the machine share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from ..errors import UnsupportedError
from ..group import GroupOptions, ThinwireGroup, register
from .net import PacedNetwork, Topology

BACKEND = "thinwire-paced"


@dataclass(frozen=True)
class PacedOptions(GroupOptions):
    """Options of a paced group. topology: of the emulated hosts; folder: where the ranks' pacers meet."""

    topology: Topology = Topology()  # noqa: RUF009
    folder: str = ""


class PacedGroup(ThinwireGroup):
    """A thinwire group over paced links. Made with PacedOptions."""

    def make_inner(self, store: Store, timeout: timedelta) -> dist.ProcessGroup:
        options = self.options
        if not isinstance(options, PacedOptions):
            raise UnsupportedError(f"a {BACKEND} group needs PacedOptions, found {type(options).__name__}")
        network = PacedNetwork(options.topology, options.folder)
        return cast(dist.ProcessGroup, _PacedInner(super().make_inner(store, timeout), self, network))


class _PacedInner:
    """The ops that a thinwire group hands to its inner groups, each followed by the wait for its bytes."""

    def __init__(self, real: dist.ProcessGroup, group: ThinwireGroup, network: PacedNetwork) -> None:
        self._real = real
        self._group = group
        self._network = network
        self._size = real.size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    # gloo's all-reduce, reduce-scatter and all-gather are rings: all bytes come from the rank before.

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._ring(self._real.allreduce(tensors, opts), 2 * _nbytes(tensors) // self._size)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._ring(self._real.allreduce_coalesced(tensors, opts), 2 * _nbytes(tensors) // self._size)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        work = self._real._reduce_scatter_base(output, input, opts)
        return self._ring(work, 2 * _nbytes([input]) // self._size)

    def _allgather_base(self, output: Tensor, input: Tensor, *opts: Any) -> dist.Work:
        return self._ring(self._real._allgather_base(output, input, *opts), _nbytes([input]))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        return self._ring(self._real.allgather(outputs, inputs, opts), _nbytes(inputs))

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_splits: list[int], in_splits: list[int], *opts: Any
    ) -> dist.Work:
        work = self._real.alltoall_base(output, input, out_splits, in_splits, *opts)
        row = _nbytes([output]) // max(output.shape[0], 1)
        sizes = out_splits or [output.shape[0] // self._size] * self._size
        return self._paced(work, [(peer, n * row) for peer, n in enumerate(sizes)])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._paced(self._real.broadcast(tensors, opts), [(opts.rootRank, _nbytes(tensors))])

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        return self._paced(self._real.recv(tensors, src, tag), [(src, _nbytes(tensors))])

    def _ring(self, work: dist.Work, hop_nbytes: int) -> dist.Work:
        before = (self._real.rank() - 1) % self._size
        return self._paced(work, [(before, hop_nbytes * (self._size - 1))])

    def _paced(self, work: dist.Work, incoming: list[tuple[int, int]]) -> dist.Work:
        ranks = dist.get_process_group_ranks(self._group)
        me = self._real.rank()
        sources = [(ranks[peer], nbytes) for peer, nbytes in incoming if peer != me and nbytes]
        return _PacedWork(work, self._network, ranks[me], sources)


class _PacedWork(dist.Work):
    def __init__(
        self, work: dist.Work, network: PacedNetwork, target: int, sources: list[tuple[int, int]]
    ) -> None:
        super().__init__()
        self._work = work
        self._network = network
        self._target = target
        self._sources = sources

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is None:
            self._work.wait()
        else:
            self._work.wait(timeout)
        sources, self._sources = self._sources, []
        for source, nbytes in sources:
            self._network.wait(source, self._target, nbytes)
        return True

    def get_future(self) -> Any:
        raise UnsupportedError("a paced group has no futures (DDP needs them); run as root for shaped links")

    def is_completed(self) -> bool:
        return self._work.is_completed() and not self._sources


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


register(BACKEND, PacedGroup)
