"""What is measured: collectives, in the conventions of nccl-tests.

The size of a message is that of the whole tensor: of the input for all_reduce, reduce_scatter, broadcast, all_to_all and
send_recv, of the output for all_gather. Bus bandwidth is algorithm bandwidth (size / time) times a factor that makes it
comparable with the rate of a link, whatever the number of ranks n:

    all_reduce                                  2 (n - 1) / n
    reduce_scatter, all_gather, all_to_all      (n - 1) / n
    broadcast, send_recv                        1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ....torch_names import all_gather_single, reduce_scatter_single

Group = dist.ProcessGroup
Values = Callable[[int], Tensor]
"""Rank -> its input."""


@dataclass(frozen=True)
class Op:
    """A collective.

    call(out, x, group): blocks until out holds the result. exact(values, rank, world): the result of that rank.
    """

    name: str
    call: Callable[[Tensor, Tensor, Group], None]
    exact: Callable[[Values, int, int], Tensor]
    in_place: bool = False
    """``out`` holds x before the call; x itself is not read."""
    same_everywhere: bool = False
    """All ranks end with the same values."""
    splits_in: bool = False
    """A rank's input is its share of the message."""
    splits_out: bool = False
    """A rank's output is its share of the message."""

    def numel(self, nbytes: int, itemsize: int, world: int) -> int:
        """Values of a message of about nbytes: rounded down to what the ranks can share, at least one each."""
        return max(nbytes // itemsize // world, 1) * world

    def bus_factor(self, world: int) -> float:
        """Bus bandwidth / algorithm bandwidth, as nccl-tests define it."""
        if self.name in ("broadcast", "send_recv"):
            return 1.0
        return (2 if self.name == "all_reduce" else 1) * (world - 1) / world

    def link_nbytes(self, wire_nbytes: float, world: int) -> float:
        """Bytes that cross the busiest link in one direction, where every rank has a link of its own.

        wire_nbytes: sent per rank, on average over the ranks. A broadcast is a tree: a rank either sends nothing or at
        least all of it, and every rank but the root receives all of it.
        """
        return wire_nbytes * world / (world - 1) if self.name == "broadcast" and world > 1 else wire_nbytes


def _all_reduce(out: Tensor, x: Tensor, group: Group) -> None:
    dist.all_reduce(out, group=group)


def _reduce_scatter(out: Tensor, x: Tensor, group: Group) -> None:
    reduce_scatter_single(out, x, group=group)


def _all_gather(out: Tensor, x: Tensor, group: Group) -> None:
    all_gather_single(out, x, group=group)


def _broadcast(out: Tensor, x: Tensor, group: Group) -> None:
    dist.broadcast(out, group=group, group_src=0)


def _all_to_all(out: Tensor, x: Tensor, group: Group) -> None:
    dist.all_to_all_single(out, x, group=group)


def _send_recv(out: Tensor, x: Tensor, group: Group) -> None:
    rank, world = group.rank(), group.size()
    works = [
        dist.irecv(out, group=group, group_src=(rank - 1) % world),
        dist.isend(x, group=group, group_dst=(rank + 1) % world),
    ]
    for work in works:
        assert work is not None, "every rank is in the group"
        work.wait()


def _sum(values: Values, world: int) -> Tensor:
    total = values(0).clone()
    for rank in range(1, world):
        total += values(rank)
    return total


def _part(x: Tensor, rank: int, world: int) -> Tensor:
    return x.view(world, -1)[rank]


OPS = {
    op.name: op
    for op in (
        Op("all_reduce", _all_reduce, lambda v, r, n: _sum(v, n), in_place=True, same_everywhere=True),
        Op(
            "reduce_scatter",
            _reduce_scatter,
            lambda v, r, n: _sum(lambda p: _part(v(p), r, n), n),
            splits_out=True,
        ),
        Op(
            "all_gather",
            _all_gather,
            lambda v, r, n: torch.cat([v(p) for p in range(n)]),
            same_everywhere=True,
            splits_in=True,
        ),
        Op("broadcast", _broadcast, lambda v, r, n: v(0), in_place=True, same_everywhere=True),
        Op("all_to_all", _all_to_all, lambda v, r, n: torch.cat([_part(v(p), r, n) for p in range(n)])),
        Op("send_recv", _send_recv, lambda v, r, n: v((r - 1) % n)),
    )
}
"""send_recv: every rank sends to the next one and receives from the one before, both at once."""
