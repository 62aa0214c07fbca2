"""Pipelines under every schedule of PyTorch's: the values that arrive, and the roles of the messages."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from collectives.oracle import decoded
from support import TIMEOUT_S, gaussian, same
from thinwire import Policy, ThinwireGroup, groups, init_mesh
from thinwire.codecs import parse
from thinwire.errors import PolicyError
from thinwire.integrate.pipeline import PipelineStage
from thinwire.launch import run_ranks
from thinwire.policy import from_dict

from .test_roles import codecs_by_role

pytestmark = pytest.mark.usefixtures("kernels")
CODECS = {"activation": "int8:block=32,round=nearest", "activation_gradient": "bf16"}
BY_ROLE = from_dict(
    {"axis": {"pp": {"role": {role: {"send": codec} for role, codec in CODECS.items()}, "min_nbytes": 0}}},
    "by-role",
)
WIDTH, BATCH, MICRO = 32, 32, 8


class Kind(NamedTuple):
    """A schedule: PyTorch's class, stages on each rank, and whether they run there and back."""

    schedule: Any
    per_rank: int = 2
    back: bool = False

    def owner(self, stage: int, world: int) -> int:
        return min(stage, 2 * world - 1 - stage) if self.back else stage % world


KINDS = [
    Kind(schedules.ScheduleGPipe, 1),
    Kind(schedules.Schedule1F1B, 1),
    Kind(schedules.ScheduleInterleaved1F1B),
    Kind(schedules.ScheduleLoopedBFS),
    Kind(schedules.ScheduleInterleavedZeroBubble),
    Kind(schedules.ScheduleZBVZeroBubble, back=True),
    Kind(schedules.ScheduleDualPipeV, back=True),
]


def test_no_schedule_of_pytorchs_is_left_out() -> None:
    bases = {"PipelineScheduleSingle", "PipelineScheduleMulti"}
    known = {name for name in vars(schedules) if name.startswith("Schedule")} - bases
    assert known == {kind.schedule.__name__ for kind in KINDS}


def pp_group(world: int, policy: Policy | str) -> ThinwireGroup:
    return groups(init_mesh({"pp": world}, policy))["pp"]


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


class Wire(torch.autograd.Function):
    """A boundary between two ranks: the activation and its gradient are encoded once each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return decoded(parse(CODECS["activation"]), x.view(-1), 0).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return decoded(parse(CODECS["activation_gradient"]), grads[0].reshape(-1), 0).view(grads[0].shape)


def expected(kind: Kind, world: int, x: Tensor, target: Tensor) -> list[list[Tensor]]:
    """Each stage's gradients, computed by one process that encodes where the pipeline does."""
    total = kind.per_rank * world
    modules = layers(total)
    for part, aim in zip(x.chunk(MICRO), target.chunk(MICRO), strict=True):
        for index, module in enumerate(modules):
            if index > 0 and kind.owner(index, world) != kind.owner(index - 1, world):
                part = Wire.apply(part)  # type: ignore[no-untyped-call]
            part = module(part)
        (loss_of(part, aim) / MICRO).backward()
    return [gradients(module) for module in modules]


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def _schedules(rank: int, world: int, report: Any) -> None:
    x, target = gaussian(1, BATCH * WIDTH).view(BATCH, WIDTH), gaussian(2, BATCH * WIDTH).view(BATCH, WIDTH)
    plain, none, by_role = dist.group.WORLD, pp_group(world, "none"), pp_group(world, BY_ROLE)
    for kind in KINDS:
        total, found = kind.per_rank * world, []
        mine = [index for index in range(total) if kind.owner(index, world) == rank]
        for group, stage_class in (
            (plain, pipelining.PipelineStage),
            (none, PipelineStage),
            (by_role, PipelineStage),
        ):
            parts = {index: layers(total)[index] for index in mine}
            by_role.traffic.reset()
            stages = [stage_class(m, i, total, torch.device("cpu"), group=group) for i, m in parts.items()]
            schedule = kind.schedule(stages if kind.per_rank > 1 else stages[0], MICRO, loss_fn=loss_of)
            schedule.step(*((x,) if 0 in mine else ()), target=target if total - 1 in mine else None)
            found.append([gradients(module) for module in parts.values()])
        name = kind.schedule.__name__
        exact, passed, lossy = found
        assert all(
            same(a, b) for p, q in zip(exact, passed, strict=True) for a, b in zip(p, q, strict=True)
        ), name
        aims = expected(kind, world, x, target)
        for index, stage in zip(mine, lossy, strict=True):
            for gradient, aim in zip(stage, aims[index], strict=True):
                # The same values, but micro-batches add up in another order.
                torch.testing.assert_close(gradient, aim, rtol=1e-5, atol=1e-7, msg=f"{name}, stage {index}")
        sent = {role: c for role, c in codecs_by_role(by_role).items() if role != "unknown"}
        assert sent == CODECS, name


def test_every_schedule_sends_each_message_once_by_its_role() -> None:
    # Megatron-DeepSpeed 236, torchcomms 2941
    run_ranks(_schedules, 2, timeout=TIMEOUT_S)


def _unmarked(rank: int, world: int, report: Any) -> None:
    group = pp_group(world, BY_ROLE)
    x = torch.ones(5000)
    with pytest.raises(
        PolicyError, match=r"by role \(activation, activation_gradient\).*thinwire\.integrate\.pipeline"
    ):
        dist.send(x, group_dst=1 - rank, group=group)
    with pytest.raises(PolicyError, match=r"by role \(activation"):
        dist.recv(x, group_src=1 - rank, group=group)


def test_a_policy_by_role_refuses_a_send_without_one() -> None:
    run_ranks(_unmarked, 2, timeout=TIMEOUT_S)
