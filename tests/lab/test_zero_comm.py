"""The group that sends tokens: the program runs on, the bytes do not travel."""

from typing import Any

import torch
import torch.distributed as dist

from thinwire.integrate.mesh import init_mesh
from thinwire.lab import zero_comm
from thinwire.launch import run_ranks

_VALUES = 1 << 20  # 4 MiB of fp32


class Recorder:
    """Stands before the real inner group and adds up the tensors that it is given."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            for value in arguments:
                for x in value if isinstance(value, list) else [value]:
                    self.nbytes += x.numel() * x.element_size() if isinstance(x, torch.Tensor) else 0
            return getattr(self._real, name)(*arguments)

        return call


def _ops(rank: int, world: int, report: Any) -> int:
    group = init_mesh({"dp": world}, "none", backend=zero_comm.BACKEND).get_group("dp")
    group._inner._real = recorder = Recorder(group._inner._real)
    x = torch.full((_VALUES,), float(rank))
    dist.all_reduce(x, group=group)
    assert torch.equal(x, torch.full((_VALUES,), float(rank)))
    # What DDP takes from the future are its own values, not the token.
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    (stand_in,) = work.get_future().wait()
    assert stand_in.data_ptr() == x.data_ptr()
    shard, full = torch.empty(_VALUES // world), torch.empty(_VALUES)
    dist.reduce_scatter_tensor(shard, x, group=group)
    dist.all_gather_into_tensor(full, shard, group=group)
    assert torch.isfinite(full).all()
    if rank == 0:
        dist.send(x, 1, group=group)
        dist.send(torch.tensor([7, 8]), 1, group=group)
    if rank == 1:
        dist.recv(x, 0, group=group)
        assert torch.isfinite(x).all()
        shape = torch.zeros(2, dtype=torch.int64)
        dist.recv(shape, 0, group=group)
        assert shape.tolist() == [7, 8]  # metadata is sent for real
    flag = torch.tensor([float(rank)])
    dist.all_reduce(flag, group=group)
    assert flag.item() == sum(range(world))  # and so is what is as small as a loss
    return recorder.nbytes


def test_tokens_replace_payloads() -> None:
    sent = run_ranks(_ops, 2, timeout=60)
    # Tokens (1 + 1 + 1 + 3 + 1 bytes), 16 bytes of metadata, 4 of the flag, instead of 20 MiB.
    assert max(sent) == 27
