"""Compression's state in ``torch.distributed.checkpoint``: the same ranks go on bit for bit, others as is defined."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from support import TIMEOUT_S, gaussian, same
from thinwire import ErrorMonitor, GradientSync, GroupOptions, LoadedCompression, ThinwireGroup
from thinwire.errors import CheckpointError, UnsupportedError
from thinwire.launch import run_ranks
from thinwire.policy import Policy, from_dict

pytestmark = pytest.mark.usefixtures("kernels")
ROUNDED = "int4:block=32,round=stochastic"
SEED = 7


def policy(reduce: str = ROUNDED, gather: str | None = ROUNDED, *, difference: bool = True) -> Policy:
    axes: dict[str, Any] = {"dp": {"reduce": reduce, "feedback": True, "min_nbytes": 0}}
    # Of a lossless codec with a codebook: there is more to keep than residuals.
    axes["dp"]["broadcast"] = "exponent:reuse=8"
    if gather is not None:
        axes["zero"] = {"gather": gather, "difference": difference, "min_nbytes": 0}
    return from_dict({"axis": axes}, "test").monitored(ErrorMonitor(every=2), "dp")


def group_of(ranks: int, chosen: Policy) -> ThinwireGroup | None:
    """A group of the first ranks, which all ranks make; None on the others."""
    options = GroupOptions(
        policy=chosen, axis="dp", op_axes={"all_gather": "zero"}, feedback_by_caller=True, seed=SEED
    )
    group = dist.new_group(list(range(ranks)), backend="thinwire", pg_options=options)
    return group if isinstance(group, ThinwireGroup) else None


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(16, 37), nn.Tanh(), nn.Linear(37, 8))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = gaussian(100 * step + rank, 4 * 16).view(4, 16)
    return (model(x) - x[:, :8].sin()).square().mean()


class Trains:
    """A model under one of the integrations, trained by plain SGD."""

    def __init__(self, kind: str, group: ThinwireGroup) -> None:
        self.kind, self.group = kind, group
        self.model: Any = Net()
        self.part: Any = None
        if kind in ("sync", "sharded"):
            named = self.model.named_parameters()
            self.part = GradientSync(named, group, sharded=kind == "sharded", bucket_bytes=1024)
        elif kind == "ddp":
            # Several buckets, which are made anew after the first step.
            self.model = DistributedDataParallel(self.model, process_group=group, bucket_cap_mb=0.002)
            self.part = thinwire.compress_ddp(self.model)
        else:
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
            fully_shard(self.model, mesh=mesh)
            self.part = thinwire.compress_fsdp(self.model)

    def train(self, steps: range) -> list[Tensor]:
        for step in steps:
            if isinstance(self.part, GradientSync):
                self.part.start()
                loss_of(self.model, self.group.rank(), step).backward()
                self.part.finish()
                for bucket in self.part.buckets:
                    bucket.master.sub_(bucket.grad, alpha=0.1)
                self.part.commit()
                self.part.gather()
            else:
                loss_of(self.model, self.group.rank(), step).backward()
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.sub_(parameter.grad, alpha=0.1)
                        parameter.grad = None
        shared = gaussian(steps[0], 3000)
        dist.broadcast(shared, 0, group=self.group)
        return [local(p).clone() for p in self.model.parameters()]

    def state(self) -> dict[str, Tensor]:
        return {n: local(t).clone() for n, t in self.part.state_dict().items()}


def local(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


# The same number of ranks.


def chosen_for(kind: str) -> Policy:
    return policy(gather="int8:block=32,round=stochastic", difference=False) if kind == "fsdp" else policy()


def _exact(rank: int, world: int, folder: str, report: Any) -> None:
    for kind in ("sync", "sharded", "ddp", "fsdp"):
        path = f"{folder}/{kind}"
        group = group_of(world, chosen_for(kind))
        assert group is not None
        first = Trains(kind, group)
        first.train(range(3))
        state = thinwire.compression_state(first.part)
        # What is in a checkpoint is of tensors only: no group, no code (pytorch 75666, 79334).
        assert all(type(value) is Tensor for value in state.values())
        dcp.save({"model": first.model.state_dict(), **state}, checkpoint_id=path)
        expected = first.train(range(3, 6))

        again_group = group_of(world, chosen_for(kind))
        assert again_group is not None
        again = Trains(kind, again_group)
        weights = again.model.state_dict()
        dcp.load({"model": weights}, checkpoint_id=path)
        again.model.load_state_dict(weights)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert thinwire.load_compression(again.part, checkpoint_id=path) == LoadedCompression(True, world)
        assert all(map(same, expected, again.train(range(3, 6)))), kind
        assert torch.equal(group.calls, again_group.calls)
        assert group.codec_states() == again_group.codec_states()
        assert b"exponent" in group.codec_states()
        before, after = first.state(), again.state()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert any("@dp" in name and tensor.any() for name, tensor in after.items())
    _refused(rank, world, folder)


def _refused(rank: int, world: int, folder: str) -> None:
    group = group_of(world, policy())
    assert group is not None
    part = Trains("sharded", group).part
    with pytest.raises(CheckpointError, match=r"has no mine/0\.sync: save with thinwire\.compression_state"):
        thinwire.load_compression(part, checkpoint_id=f"{folder}/sharded", name="mine")
    with pytest.raises(CheckpointError, match="is no distributed checkpoint"):
        thinwire.load_compression(part, checkpoint_id=f"{folder}/nothing")
    with pytest.raises(CheckpointError, match="give checkpoint_id"):
        thinwire.load_compression(part)
    with pytest.raises(UnsupportedError, match="Linear has no state of compression"):
        thinwire.compression_state(nn.Linear(2, 2))  # type: ignore[arg-type]
    other = GradientSync(nn.Linear(16, 37).named_parameters(), group)
    with pytest.raises(CheckpointError, match=r"other parameters: 0\.bias.* weight differ in size"):
        thinwire.load_compression(other, checkpoint_id=f"{folder}/sharded")
    # Other buckets: masters and residuals move, and it is said that bits differ.
    wider = GradientSync(Net().named_parameters(), group, bucket_bytes=1 << 20)
    with pytest.warns(UserWarning, match="or with other buckets"):
        loaded = thinwire.load_compression(wider, storage_reader=FileSystemReader(f"{folder}/sharded"))
    assert (loaded.exact, loaded.reset) == (False, ())
    assert any(t.any() for n, t in wider.state_dict().items() if "@dp" in n)


def test_the_same_ranks_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Reports pytorch 75666 and 79334: the state of hooks was not in checkpoints."""
    run_ranks(_exact, 2, str(tmp_path), timeout=TIMEOUT_S)


# Another number of ranks.


def pending(
    kind: str, states: list[dict[str, Tensor]], members: list[list[tuple[str, int]]]
) -> dict[str, Tensor]:
    """What is still to be sent of each parameter's mean gradient."""
    world = len(states)
    total = {
        name.partition("@")[0]: sum(s[name].double() for s in states) / world
        for name in states[0]
        if name.endswith("@dp")
    }
    for bucket in members:
        owner = f"{bucket[0][0]}@dp.owner"
        if owner in states[0]:
            flat = torch.cat([s[owner] for s in states]).double() / (world if kind == "sync" else 1)
            assert flat.any()
            begin = 0
            for name, numel in bucket:
                total[name] = total[name] + flat[begin : begin + numel]
                begin += numel
    return total  # type: ignore[return-value]


def members_of(trains: Trains) -> list[list[tuple[str, int]]]:
    if trains.kind == "ddp":
        return trains.part.buckets()  # type: ignore[no-any-return]
    if trains.kind == "fsdp":
        return []
    return [[(m.name, m.end - m.begin) for m in b.members] for b in trains.part.buckets]


def masters_of(states: list[dict[str, Tensor]], trains: Trains) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if not isinstance(trains.part, GradientSync):
        return found
    for index, bucket in enumerate(trains.part.buckets):
        parts = states if trains.part.sharded else states[:1]
        flat = torch.cat([s[f"bucket{index}.master"] for s in parts])
        found |= {m.name: flat[m.begin : m.end] for m in bucket.members}
    return found


def of_all(state: dict[str, Tensor] | None, ranks: int) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, state)
    return every[:ranks]


def _resized(rank: int, world: int, folder: str, report: Any) -> None:
    # Owners of chunks hold residuals from three ranks on.
    for kind, old in (("sync", 3), ("ddp", 3), ("sharded", 2), ("fsdp", 2)):
        path = f"{folder}/{kind}"
        group = group_of(old, chosen_for(kind))
        first = Trains(kind, group) if group is not None else None
        if first is not None:
            first.train(range(3))
        dcp.save(thinwire.compression_state(first.part) if first is not None else {}, checkpoint_id=path)
        before = of_all(first.state() if first is not None else None, old)
        members = _of_rank0(members_of(first) if first is not None else None)
        for new in (1, 4):
            _one_size(kind, path, before, members, new, first)


def _of_rank0(value: Any) -> Any:
    answer = [value]
    dist.broadcast_object_list(answer, 0)
    return answer[0]


def _one_size(kind: str, path: str, before: list[Any], members: Any, new: int, first: Trains | None) -> None:
    group = group_of(new, chosen_for(kind))
    old = len(before)
    if group is None:
        of_all(None, new)
        return
    again = Trains(kind, group)
    with pytest.warns(UserWarning, match=rf"saved by {old} rank\(s\) and is loaded by {new}"):
        loaded = thinwire.load_compression(again.part, checkpoint_id=path)
    assert (loaded.exact, loaded.ranks) == (False, old)
    assert "codebooks of axis dp" in loaded.reset
    after = of_all(again.state(), new)
    if dist.get_rank() == 0:
        assert first is not None
        assert torch.equal(group.calls, first.group.calls), (
            "seeds go on: no rank draws the same numbers again"
        )
        assert all(torch.equal(after[0][n], s[n]) for s in after for n in s if n.endswith("@dp"))
        masters = masters_of(before, first)
        found = masters_of(after, again)
        assert masters.keys() == found.keys()
        assert all(same(masters[name], found[name]) for name in masters), "masters are cut anew, exactly"
        if new == 1 and kind != "fsdp":
            assert "residuals, which one rank has no use for" in loaded.reset
        else:
            assert loaded.reset == ("codebooks of axis dp",)
            expected, kept = pending(kind, before, members), pending(kind, after, [])
            assert expected.keys() == kept.keys()
            for name, values in expected.items():
                assert torch.allclose(values, kept[name], rtol=1e-5, atol=1e-7), (kind, old, new, name)
                assert values.any()
    again.train(range(3, 4))


@pytest.mark.slow  # four processes
def test_other_ranks_get_what_is_still_to_be_sent(tmp_path: Path) -> None:
    """Report torchft 238: what every rank must agree on was missing in the checkpoint. Masters and counters are there."""
    run_ranks(_resized, 4, str(tmp_path), timeout=TIMEOUT_S)


def _grown(rank: int, world: int, folder: str, report: Any) -> None:
    """From one rank, and to one; low-rank starts, which all ranks share; and groups that began at other ranks."""
    solo = group_of(1, policy())
    first = Trains("sharded", solo) if solo is not None else None
    dcp.save(
        thinwire.compression_state(first.part) if first is not None else {}, checkpoint_id=f"{folder}/one"
    )
    pair = group_of(2, policy())
    assert pair is not None
    grown = Trains("sharded", pair)
    with pytest.warns(UserWarning, match="residuals, which one rank did not have"):
        thinwire.load_compression(grown.part, checkpoint_id=f"{folder}/one")
    assert not any(t.any() for n, t in grown.state().items() if "@dp" in n)

    grown.train(range(3))
    dcp.save(thinwire.compression_state(grown.part), checkpoint_id=f"{folder}/two")
    before = of_all(grown.state(), world)
    last = group_of(1, policy())
    if last is not None:
        shrunk = Trains("sharded", last)
        with pytest.warns(UserWarning, match="residuals, which one rank has no use for"):
            thinwire.load_compression(shrunk.part, checkpoint_id=f"{folder}/two")
        masters, found = masters_of(before, grown), masters_of([shrunk.state()], shrunk)
        assert all(same(masters[name], found[name]) for name in masters)

    low = group_of(2, policy("lowrank:rank=2", None))
    assert low is not None
    second = Trains("sync", low)
    second.train(range(3))
    dcp.save(thinwire.compression_state(second.part), checkpoint_id=f"{folder}/low")
    again = Trains("sync", low)
    assert thinwire.load_compression(again.part, checkpoint_id=f"{folder}/low").exact
    assert all(map(same, second.train(range(3, 5)), again.train(range(3, 5)))) is False, (
        "weights were not loaded"
    )
    assert any(name.endswith(".q") for name in again.state())

    # Each rank a group of its own: two groups of the same kind in one checkpoint.
    alone: Any = [
        dist.new_group([r], backend="thinwire", pg_options=GroupOptions(policy="bf16")) for r in (0, 1)
    ]
    dcp.save(thinwire.compression_state(alone[rank]), checkpoint_id=f"{folder}/mesh")
    assert thinwire.load_compression(alone[rank], checkpoint_id=f"{folder}/mesh").exact


def test_from_and_to_one_rank_low_rank_starts_and_several_groups(tmp_path: Path) -> None:
    run_ranks(_grown, 2, str(tmp_path), timeout=TIMEOUT_S)
