"""MPI's own collectives, blocking, as an MPI program calls them through mpi4py: the baseline of ``--transport mpi``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ....mpi.buffers import memory
from ....mpi.process import process
from ....mpi.reductions import moved, reduced


class PlainMpi:
    """All ranks of MPI_COMM_WORLD. 16-bit floats, which MPI lacks, are added as in a thinwire group over MPI."""

    def __init__(self) -> None:
        self._mpi = process().mpi
        self._comm: Any = self._mpi.COMM_WORLD.Dup()

    def call(self, op: str, out: Tensor, x: Tensor) -> None:
        """One of :data:`.cases.OPS`, on contiguous tensors; returns when ``out`` holds the result."""
        comm = self._comm
        if op in ("all_reduce", "reduce_scatter"):
            kind, add = reduced(out.dtype, dist.ReduceOp.SUM)
            if op == "all_reduce":
                comm.Allreduce(self._mpi.IN_PLACE, [memory(out), out.numel(), kind], add)
            else:
                comm.Reduce_scatter_block(
                    [memory(x), out.numel(), kind], [memory(out), out.numel(), kind], add
                )
            return
        kind = moved(out.dtype)
        source, target = [memory(x), x.numel(), kind], [memory(out), out.numel(), kind]
        if op == "all_gather":
            comm.Allgather(source, [memory(out), x.numel(), kind])
        elif op == "broadcast":
            comm.Bcast(target, 0)
        elif op == "all_to_all":
            part = x.numel() // comm.size
            comm.Alltoall([memory(x), part, kind], [memory(out), part, kind])
        else:
            rank, world = comm.rank, comm.size
            comm.Sendrecv(source, (rank + 1) % world, 0, target, (rank - 1) % world, 0)
