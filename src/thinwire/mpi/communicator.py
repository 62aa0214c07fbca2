"""The ranks of one group: an MPI communicator of its own, whose calls are operations with a time-out."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import MismatchError, PeerError
from ..machine import kernel
from .buffers import memory, pieces
from .library import check_launch
from .operation import Operation
from .process import Process, process

_OWN_TAGS = 0x74770000
"""Tags from here on are thinwire's own (roles); many an MPI has no such large ones."""
_CREATE_TAG = 0x7478
_made = itertools.count()


def card() -> str:
    """What the ranks of a group must know of each other before they can share a communicator."""
    p = process()
    check_launch(p.mpi, os.environ)
    return json.dumps({"rank": p.rank, "size": p.size, "mpi": p.version, "kernel": kernel()})


class Communicator:
    """A communicator for the ranks whose :func:`card` s these are, in this order. Made by all of them at the same time.

    rank, size: in the group. Raises MismatchError on every rank if they are not processes of one MPI job.
    """

    def __init__(self, cards: Sequence[str], rank: int, timeout_s: float) -> None:
        self.process: Process = process()
        self.rank, self.size = rank, len(cards)
        self.timeout_s = timeout_s
        self.everybody_else = [r for r in range(self.size) if r != rank]
        self._world = _world_ranks(cards)
        self._failure: str | None = None
        self._abandoned: list[Operation] = []
        self._lock = threading.Lock()
        MPI, world = self.process.mpi, self.process.mpi.COMM_WORLD
        group = world.Get_group().Incl(self._world)
        # Blocking, but every rank is on its way: they have exchanged cards.
        self.comm: Any = self.process.call(world.Create_group, group, _CREATE_TAG)
        group.Free()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        # World rank of the first, and its count: the same name on all ranks, another for each communicator.
        self._id: int = self.process.call(self.comm.bcast, (self.process.rank << 32) + next(_made))
        self._top_tag = min(world.Get_attr(MPI.TAG_UB), (1 << 31) - 1)
        self.process.join(set(self._world), timeout_s)
        # Containers with networks of their own share the cores of their machine all the same.
        here = sum(json.loads(c)["kernel"] == kernel() for c in cards)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.process.crowded |= here > cores

    # Messages.

    def send(self, flat: Tensor, dst: int, tag: int, *, keep: Any = None) -> Operation:
        """Send a flat tensor, which the operation keeps, to rank ``dst``."""
        BYTE, tag = self.process.mpi.BYTE, self._tag(tag)
        return self.start(
            lambda: [self._call("Isend", [memory(x), _nbytes(x), BYTE], dst, tag) for x in pieces(flat)],
            f"send to rank {dst}",
            peers=[dst],
            keep=(flat, keep),
        )

    def recv(
        self, flat: Tensor, src: int | None, tag: int, *, finish: Callable[[], None] | None = None
    ) -> Operation:
        """Receive into a flat tensor from rank ``src``, of exactly its size. None: from any rank, one piece only."""
        BYTE, tag = self.process.mpi.BYTE, self._tag(tag)
        source = self.process.mpi.ANY_SOURCE if src is None else src
        return self.start(
            lambda: [self._call("Irecv", [memory(x), _nbytes(x), BYTE], source, tag) for x in pieces(flat)],
            f"recv from {'any rank' if src is None else f'rank {src}'}",
            peers=[] if src is None else [src],
            keep=flat,
            finish=finish,
            expected=_nbytes(flat),
        )

    def collective(
        self,
        name: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        keep: Any,
        finish: Callable[[], None] | None = None,
        awaited: bool = False,
    ) -> Operation:
        """A non-blocking collective of MPI by its name (``Iallreduce``), once for each piece of the message."""
        return self.start(
            lambda: [self._call(name, *each) for each in arguments],
            f"{name} among {self.size} ranks",
            peers=self.everybody_else,
            keep=(arguments, keep),
            finish=finish,
            awaited=awaited,
        )

    def start(
        self,
        begin: Callable[[], list[Any]],
        what: str,
        *,
        peers: Sequence[int],
        keep: Any = None,
        finish: Callable[[], None] | None = None,
        expected: int | None = None,
        awaited: bool = False,
    ) -> Operation:
        """Begin requests. Raises PeerError if MPI refuses them, or the communicator has failed before."""
        self.process.look()
        given_up = self.given_up()
        if given_up is not None:
            raise PeerError(f"{what}: refused, {given_up}")
        if finish is not None and torch.is_inference_mode_enabled():
            # The mode belongs to a thread, and its tensors may be written only inside of it.
            finish = torch.inference_mode()(finish)
        try:
            requests = begin()
        except self.process.mpi.Exception as e:
            self.give_up(f"{what} failed: {e}")
            raise PeerError(f"{what} failed: {e}") from e
        return Operation(
            self, requests, what, peers=peers, keep=keep, finish=finish, expected=expected, awaited=awaited
        )

    def _call(self, name: str, *args: Any) -> Any:
        return self.process.call(getattr(self.comm, name), *args)

    def _tag(self, tag: int) -> int:
        if tag >= _OWN_TAGS:
            return int(self._top_tag - (tag - _OWN_TAGS))
        return tag

    # Failures.

    def given_up(self) -> str | None:
        """Why this communicator cannot be used any more; None: it can."""
        return self._failure if self._failure is not None else self.process.failed.get(self._id)

    def give_up(self, why: str) -> None:
        """Let calls under way fail: here, and by a notice on all ranks."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = why
        self.process.tell(
            set(self._world), group=self._id, text=f"rank {self.rank} of the group has given up: {why}"
        )

    def abandon(self, operation: Operation, why: str) -> None:
        """Keep an operation that has failed, with its buffers, for the rest of the process."""
        self._abandoned.append(operation)
        self.process.fail()
        self.give_up(why)

    def left_at(self, rank: int) -> float:
        """When a rank's notice of leaving came, in the clock's seconds; never: infinity."""
        return self.process.left.get(self._world[rank], math.inf)

    def free(self) -> None:
        """Give the communicator back. All ranks do."""
        if self.comm and self.given_up() is None and not self.process.mpi.Is_finalized():
            self.process.call(self.comm.Free)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _world_ranks(cards: Sequence[str]) -> list[int]:
    """Ranks of MPI_COMM_WORLD. Raises MismatchError if the cards are not of different processes of one job."""
    read = [json.loads(c) for c in cards]
    ranks = [int(c["rank"]) for c in read]
    if len({(c["mpi"], c["size"]) for c in read}) > 1 or len(set(ranks)) < len(ranks):
        lines = "\n".join(
            f"  rank {r}: {c['mpi']}, process {c['rank']} of {c['size']} in its MPI_COMM_WORLD"
            for r, c in enumerate(read)
        )
        raise MismatchError(
            "the ranks of a group are not processes of one MPI job; start them all by the mpirun of one MPI library:\n"
            + lines
        )
    return ranks
