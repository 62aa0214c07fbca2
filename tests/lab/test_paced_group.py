"""Paced groups: the values are right, and no op ends before its bytes could have come over the link."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.integrate.mesh import init_mesh
from thinwire.lab import paced_group
from thinwire.lab.net import Topology
from thinwire.lab.paced_group import PacedOptions
from thinwire.launch import run_ranks

_RATE = 40_000_000
_VALUES = 1 << 18  # 1 MiB of fp32


def _ops(rank: int, world: int, folder: str, policy: str, report: Any) -> float:
    options = PacedOptions(topology=Topology(2, 1, rate="40mbit"), folder=folder)
    group = init_mesh({"dp": world}, policy, backend=paced_group.BACKEND, options=options).get_group("dp")
    x = torch.ones(_VALUES)
    dist.barrier()
    start = time.monotonic()
    dist.all_reduce(x, group=group)
    seconds = time.monotonic() - start
    assert torch.equal(x, torch.full((_VALUES,), 2.0))
    return seconds


def test_an_all_reduce_takes_as_long_as_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain = run_ranks(_ops, 2, str(tmp_path / "a"), "none", timeout=60)
    half = run_ranks(_ops, 2, str(tmp_path / "b"), "bf16", timeout=60)
    # 2 (W-1)/W N bytes come in, less one burst of at most 16 KiB that an idle link lets pass at once.
    nbytes = 4 * _VALUES
    assert min(plain) >= 8 * (nbytes - (16 << 10)) / _RATE
    assert min(half) >= 8 * (nbytes / 2 - (16 << 10)) / _RATE
