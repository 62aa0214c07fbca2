"""A command that is itself one of the ranks: ``mpirun -n 8 thinwire ...``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...errors import LayoutError
from ...group import GroupOptions
from ...mpi.library import check_launch
from ...mpi.process import process
from ..wiring import Wiring


class Ranks:
    """Context manager: the processes of this mpirun, with a default group over MPI.

    Raises LayoutError if they are not ``world``, MismatchError where launcher and library are of different MPIs.
    """

    def __init__(self, world: int) -> None:
        own = process()
        check_launch(own.mpi, os.environ)
        if own.size != world:
            raise LayoutError(
                f"the layout has {world} ranks, but MPI has {own.size} process(es); start it with mpirun -n {world}"
            )
        self.first = own.rank == 0
        self.library = own.version
        self.wiring = Wiring(options=GroupOptions(backend="mpi"))

    def __enter__(self) -> Ranks:
        torch.set_num_threads(1)
        dist.init_process_group("thinwire", init_method="mpi://", pg_options=self.wiring.options)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            dist.destroy_process_group()

    def one_by_one(self, prepare: Callable[[], object]) -> None:
        """Rank 0 prepares what all need, then the others find it done."""
        if self.first:
            prepare()
        dist.barrier()
        if not self.first:
            prepare()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        on_message: Callable[[int, Any], None] | None = None,
        **_: Any,
    ) -> list[Any]:
        """``fn(rank, world, *args, report)`` in this rank: a list of its result alone."""
        rank = dist.get_rank()

        def report(message: Any) -> None:
            if on_message is not None:
                on_message(rank, message)

        return [fn(rank, dist.get_world_size(), *args, report)]
