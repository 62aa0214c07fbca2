"""Pipeline stages whose messages carry their roles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from support import TIMEOUT_S, gaussian
from thinwire import groups, init_mesh
from thinwire.errors import PolicyError
from thinwire.integrate.pipeline import PipelineStage
from thinwire.launch import run_ranks
from thinwire.policy import from_dict

from .test_roles import codecs_by_role

pytestmark = pytest.mark.usefixtures("kernels")
BY_ROLE = from_dict({"axis": {"pp": {"role": {"activation": {"send": "fp16"}}, "send": "bf16"}}}, "by-role")
WIDTH, BATCH, MICRO = 64, 64, 4


def layers(count: int) -> list[nn.Linear]:
    torch.manual_seed(5)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def _roles(rank: int, world: int, report: Any) -> None:
    x, target = gaussian(1, BATCH * WIDTH).view(BATCH, WIDTH), gaussian(2, BATCH * WIDTH).view(BATCH, WIDTH)
    for kind, per_rank in ((Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)):
        total = per_rank * world
        single = nn.Sequential(*layers(total))
        loss_of(single(x), target).backward()
        for policy, codecs in (("none", {"pass-through"}), (BY_ROLE, {"fp16", "bf16"})):
            group = groups(init_mesh({"pp": world}, policy))["pp"]
            mine = {i: layers(total)[i] for i in range(rank, total, world)}
            stages = [PipelineStage(m, i, total, torch.device("cpu"), group=group) for i, m in mine.items()]
            schedule: Any = kind(stages if per_rank > 1 else stages[0], MICRO, loss_fn=loss_of)
            inputs = (x,) if rank == 0 else ()
            schedule.step(*inputs, target=target if rank == world - 1 else None)
            for index, module in mine.items():
                reference = single[index].weight.grad
                assert reference is not None
                close = 1e-6 if policy == "none" else 2e-3  # bf16: 2**-9 of a gradient's size at each hop
                torch.testing.assert_close(module.weight.grad, reference, rtol=0, atol=close)
            found = codecs_by_role(group)
            sent = {role: codec for role, codec in found.items() if role != "unknown"}
            assert set(sent) == {"activation", "activation_gradient"}
            assert set(sent.values()) == codecs


def test_roles_of_a_schedules_messages() -> None:
    run_ranks(_roles, 2, timeout=TIMEOUT_S)


def _unmarked(rank: int, world: int, report: Any) -> None:
    group = groups(init_mesh({"pp": world}, BY_ROLE))["pp"]
    x = torch.ones(5000)
    with pytest.raises(PolicyError, match=r"by role \(activation\).*thinwire\.integrate\.pipeline"):
        dist.send(x, group_dst=1 - rank, group=group)
    with pytest.raises(PolicyError, match=r"by role \(activation\)"):
        dist.recv(x, group_src=1 - rank, group=group)


def test_a_policy_by_role_refuses_a_send_without_one() -> None:
    run_ranks(_unmarked, 2, timeout=TIMEOUT_S)
