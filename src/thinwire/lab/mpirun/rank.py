"""One process of an mpirun: ``python -m thinwire.lab.mpirun.rank FOLDER`` does the job that lies in the folder."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path

import torch
import torch.distributed as dist

from ...group import GroupOptions
from ...launch import Reporter, send
from ...mpi.process import process
from .command import JOB, SOCKET

WORLD = GroupOptions(backend="mpi")
"""The default group of the ranks."""


def main(folder: Path) -> None:
    fn, args, timeout_s, meet_at = pickle.loads((folder / JOB).read_bytes())
    torch.set_num_threads(1)
    # By its path, a socket is reached from every network namespace.
    line = Client(str(folder / SOCKET), family="AF_UNIX")
    rank = -1
    try:
        rank, world = process().rank, process().size
        line.send_bytes(pickle.dumps((rank, os.getpid())))
        dist.init_process_group(
            "thinwire",
            init_method=meet_at,
            rank=rank,
            world_size=world,
            pg_options=WORLD,
            timeout=timedelta(seconds=timeout_s),
        )
        result = fn(rank, world, *args, Reporter(line))
        dist.destroy_process_group()
        send(line, "result", result)
    except BaseException as e:
        if rank < 0:
            line.send_bytes(pickle.dumps((rank, os.getpid())))
        send(line, "error", (f"{type(e).__name__}: {e}", traceback.format_exc()))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
