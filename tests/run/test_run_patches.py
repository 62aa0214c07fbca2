"""Groups, models and loss scalers of a script that does not know thinwire, in processes that end with the test."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from support import TIMEOUT_S, gaussian
from thinwire.errors import PolicyError, UnsupportedError
from thinwire.group import register
from thinwire.integrate.ddp import DdpCompression
from thinwire.launch import run_ranks
from thinwire.policy import Policy, from_dict
from thinwire.run.patches import BACKEND, Compression, LaunchedGroup, inner_backend
from thinwire.run.report import Report
from thinwire.run.settings import RunSettings

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize(
    ("asked", "has_cuda", "found"),
    [
        ("undefined", False, "gloo"),
        ("undefined", True, "cpu:gloo,cuda:nccl"),
        ("gloo", True, "gloo"),
        ("nccl", True, "nccl"),
        ("cuda:nccl,cpu:gloo", True, "cpu:gloo,cuda:nccl"),
        ("cpu:gloo", False, "gloo"),
    ],
)
def test_the_inner_backend_is_the_one_that_the_script_names(asked: str, has_cuda: bool, found: str) -> None:
    assert inner_backend(asked, has_cuda) == found


@pytest.mark.parametrize("asked", ["mpi", "cpu:gloo,cuda:ucc", "nccl", "cpu:gloo,cuda:nccl"])
def test_backends_that_are_refused(asked: str) -> None:
    with pytest.raises(UnsupportedError, match=asked):
        inner_backend(asked, False)


def policy(codec: str = "int4:block=128") -> Policy:
    return from_dict({"axis": {"dp": {"reduce": codec, "feedback": True, "min_nbytes": 64}}}, "test")


def install(**settings: Any) -> Report:
    register(BACKEND, LaunchedGroup)
    chosen = policy()
    report = Report(RunSettings("test", **settings), chosen, rank=1)
    Compression(report.settings, chosen, report).install()
    return report


def model(group: Any = None) -> DistributedDataParallel:
    torch.manual_seed(1)
    return DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8)), process_group=group)


def backward(ddp: nn.Module, rank: int, factor: float = 1.0) -> Tensor:
    ddp.zero_grad()
    loss = ddp(gaussian(rank, 128).view(4, 32)).square().mean() * factor
    loss.backward()
    return loss


def residuals(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    (state,) = [state for _, state in ddp._comm_hooks]
    assert isinstance(state, DdpCompression)
    return {name: residual.clone() for name, residual in state.state_dict().items() if "@" in name}


def codecs(group: Any, op: str = "all_reduce") -> set[tuple[str, str]]:
    return {(m.role, m.codec.split(":")[0]) for m in group.traffic.entries() if m.op == op}


def _groups(rank: int, world: int, report: Any) -> None:
    # Imported and made before: what was there stays as it was.
    earlier = dist.new_group
    before = dist.group.WORLD
    install(axes={"model": "tp"}, require_feedback=True, lanes=3)
    assert not isinstance(before, LaunchedGroup)
    for backend in ("cpu:gloo", None, "gloo"):
        group = earlier(backend=backend)
        assert isinstance(group, LaunchedGroup), backend
        assert (group.options.backend, group.options.lane_count()) == ("gloo", 3)
        assert dist.get_backend(group) == (backend or "gloo")
    some = earlier([1], backend="gloo")
    assert isinstance(some, LaunchedGroup) == (rank == 1)
    inner: Any = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "model")).get_group("model")
    assert isinstance(inner, LaunchedGroup)
    assert (inner.getGroupDesc(), inner.axis(), inner.size()) == ("mesh_model", "tp", 1)
    with pytest.raises(
        PolicyError, match="'mesh_stage' of the script is of no known axis; say which with --axis stage=AXIS"
    ):
        earlier(group_desc="mesh_stage")
    named: Any = earlier(group_desc="mesh_model")
    assert named.axis() == "tp"
    assert earlier([rank], group_desc="CONTEXT_PARALLEL_GROUP", use_local_synchronization=True).axis() == "cp"
    x = gaussian(rank, 1000)
    dist.all_reduce(x, group=named)
    assert codecs(named) == {("unknown", "pass-through")}
    dist.monitored_barrier(group)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, rank, group=group)
    assert gathered == [0, 1]
    with pytest.warns(UserWarning, match="options of the script's gloo group are not used"):
        earlier(backend="gloo", pg_options=dist.ProcessGroupGloo._Options())  # type: ignore[attr-defined]
    # DDP has feedback; of the other reductions only lossy ones are refused.
    backward(model(group), rank)
    small = torch.ones(3)
    dist.all_reduce(small, group=group)
    most = gaussian(rank, 1000)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    with pytest.raises(PolicyError, match="without the error feedback that the policy asks for"):
        dist.all_reduce(gaussian(rank, 1000), group=group)


def test_groups_however_they_are_made_and_reductions_without_feedback_refused() -> None:
    run_ranks(_groups, 2, timeout=TIMEOUT_S)


def _scaled(rank: int) -> None:
    plain, scaled = (model(dist.new_group(backend="gloo")) for _ in range(2))
    backward(plain, rank)
    idle = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.0)
    assert idle.get_scale() != scaler.get_scale()
    scaled.zero_grad()
    loss = scaled(gaussian(rank, 128).view(4, 32)).square().mean()
    scaler.scale(loss).backward()
    assert all(
        torch.equal(a, b) for a, b in zip(residuals(plain).values(), residuals(scaled).values(), strict=True)
    )
    before = residuals(scaled)
    loss = scaled(gaussian(rank, 128).view(4, 32)).square().mean() * (torch.inf if rank == 1 else 1.0)
    scaler.scale(loss).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9, "the scaler has seen it"
    assert all(torch.equal(before[name], r) for name, r in residuals(scaled).items())


def _ddp(rank: int, world: int, report: Any) -> None:
    install()
    group: Any = dist.new_group(backend="gloo")
    ddp = model(group)
    with torch.no_grad():
        ddp(torch.ones(4, 32))
    assert not ddp._comm_hooks, "a forward pass without gradients leaves the script its chance"
    backward(ddp, rank)
    assert codecs(group) >= {("gradient", "int4")}
    assert any(float(r.abs().max()) > 0 for r in residuals(ddp).values())
    # No scaler, but a script that looks at the norm: one rank's bad step leaves no trace.
    before = residuals(ddp)
    backward(ddp, rank, torch.nan if rank == 0 else 1.0)
    assert all(torch.equal(before[name], r) for name, r in residuals(ddp).items())

    # The script's own hook stays; what it sends is told as being without feedback.
    other: Any = dist.new_group(backend="gloo")
    own = model(other)
    own.register_comm_hook(other, fp16_compress_hook)
    backward(own, rank)
    assert [hook for hook, _ in own._comm_hooks] == [fp16_compress_hook]
    assert codecs(other) >= {("unknown", "int4")}
    _scaled(rank)


def test_ddp_gets_feedback_without_the_loss_scale_and_keeps_a_hook_of_its_own() -> None:
    run_ranks(_ddp, 2, timeout=TIMEOUT_S)
