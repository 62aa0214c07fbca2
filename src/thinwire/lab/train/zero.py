"""Who holds which part of gradients and optimizer state: ZeRO stages 0 to 3 (Rajbhandari et al. 2020).

0 and 1 stand on ``GradientSync``: flat buckets, all-reduced (replicas) or reduce-scattered. 2 and 3 are FSDP2, over
thinwire's groups with ``compress_fsdp``. Replicas can be PyTorch's, too: ``DistributedDataParallel``, in :mod:`.ddp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from thinwire.errors import UnsupportedError
from thinwire.group import ThinwireGroup
from thinwire.integrate.fsdp import FsdpCompression, compress_fsdp
from thinwire.integrate.gradients import GradientSync
from thinwire.integrate.roles import as_role

from .config import TrainConfig
from .mesh import axis_group, axis_rank
from .model import Stage
from .optim import adamw_of, make_adamw
from .plain import Bf16AllGather, Bf16ReduceScatter, Hook
from .update import Gradient


def _shards(stages: list[Stage]) -> dict[str, int | None]:
    return {name: split for stage in stages for name, split in stage.shards.items()}


def _parameters(stages: list[Stage]) -> list[tuple[str, nn.Parameter]]:
    return [item for stage in stages for item in stage.named_parameters()]


class BucketUpdate:
    """ZeRO 0 (replicas) and 1 (optimizer state sharded over dp)."""

    def __init__(self, stages: list[Stage], mesh: DeviceMesh, config: TrainConfig) -> None:
        self._mesh = mesh
        self._shards = _shards(stages)
        self._parameters = _parameters(stages)
        self._tp = axis_group(mesh, "tp")
        self._rank = dist.get_rank()
        dimensions = {name: p.ndim for name, p in self._parameters}

        def label(name: str) -> str:
            if dimensions[name] > 1:
                return "decay"
            return "tp_partial" if self._tp is not None and self._shards[name] is None else "no_decay"

        self._sync = GradientSync(
            self._parameters,
            axis_group(mesh, "dp"),
            labels=label,
            sharded=config.zero == 1,
            bucket_bytes=config.bucket_bytes,
            rollback=True,  # any precision can overflow, and a residual must not keep what was skipped
        )
        buckets = self._sync.buckets
        self._optimizer = make_adamw(
            [b.master for b in buckets if b.label == "decay"],
            [b.master for b in buckets if b.label != "decay"],
            config.optimizer,
            fused=True,
        )
        self._owns_shard = config.zero == 1 or axis_rank(mesh, "dp") == 0
        self._owns_copy = axis_rank(mesh, "tp") == 0

    def wrapped(self, stages: Mapping[int, Stage]) -> dict[int, nn.Module]:
        return dict(stages)

    def start(self, micro_batches: int, scale: float) -> None:
        self._sync.start(micro_batches, scale)

    def finish(self) -> list[Gradient]:
        self._sync.finish()
        gradients = []
        for bucket in self._sync.buckets:
            partial = bucket.label == "tp_partial"
            if partial:
                with as_role(self._tp, "gradient"):
                    dist.all_reduce(bucket.grad, group=self._tp)
            gradients.append(Gradient(bucket.grad, self._owns_shard and (self._owns_copy or not partial)))
        return gradients

    def take(self, lr: float, factor: float) -> None:
        for bucket in self._sync.buckets:
            bucket.master.grad = bucket.grad.mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._sync.commit()
        self._sync.gather()

    def skip(self) -> None:
        self._sync.skip()

    def weights(self) -> dict[str, Tensor]:
        return {
            name: p.detach() if self._tp is None else _on_tp_mesh(p.detach(), self._shards[name], self._mesh)
            for name, p in self._parameters
        }

    def gradients(self) -> dict[str, Tensor]:
        if self._sync.sharded:
            raise UnsupportedError("ZeRO-1 holds a shard of each gradient; use zero=0 to see them whole")
        return {
            member.name: bucket.grad[member.begin : member.end].view(member.parameter.shape)
            for bucket in self._sync.buckets
            for member in bucket.members
        }

    def state(self) -> dict[str, Tensor]:
        state = dict(self._sync.state_dict())
        for i, bucket in enumerate(self._sync.buckets):
            for key, tensor in self._optimizer.state[bucket.master].items():
                state[f"bucket{i}.{key}"] = tensor
        # Shards of flat buckets mean something to the rank that made them only.
        return {f"rank{self._rank}.{name}": tensor for name, tensor in state.items()}

    def weights_changed(self) -> None:
        self._sync.reset_masters()

    def state_changed(self) -> None:
        pass


class FsdpUpdate:
    """ZeRO 2 and 3: FSDP2 on the dp axis. Parameters are fp32 shards; compute sees them in ``precision``."""

    def __init__(
        self, stages: list[Stage], mesh: DeviceMesh, config: TrainConfig, hook: Hook | None = None
    ) -> None:
        self._shards = _shards(stages)
        self._tp = axis_group(mesh, "tp")
        self._owns_copy = axis_rank(mesh, "tp") == 0
        self._scale = 1.0
        self._compressions: list[FsdpCompression] = []
        for stage in stages:
            _shard_stage(stage, mesh, config)
            if hook is not None:
                _send_bf16(stage, hook)
            elif isinstance(axis_group(mesh, "dp"), ThinwireGroup):
                # Any precision can overflow, and a residual must not keep what was skipped.
                self._compressions.append(compress_fsdp(stage, scale=lambda: self._scale, rollback=True))
        self._parameters = _parameters(stages)
        self._optimizer = adamw_of([p for _, p in self._parameters], config.optimizer, fused=False)

    def wrapped(self, stages: Mapping[int, Stage]) -> dict[int, nn.Module]:
        return dict(stages)

    def start(self, micro_batches: int, scale: float) -> None:
        self._scale = scale
        self._optimizer.zero_grad()

    def finish(self) -> list[Gradient]:
        gradients, partial = [], []
        for name, parameter in self._parameters:
            grad = parameter.grad
            assert isinstance(grad, DTensor)
            local = grad.to_local()
            if self._scale != 1.0:
                local.div_(self._scale)
            copied = self._tp is not None and self._shards[name] is None
            if copied:
                partial.append(local)
            gradients.append(Gradient(local, self._owns_copy or not copied))
        if partial:
            flat = torch.cat([p.reshape(-1) for p in partial])
            with as_role(self._tp, "gradient"):
                dist.all_reduce(flat, group=self._tp)
            for part, total in zip(partial, torch.split(flat, [p.numel() for p in partial]), strict=True):
                part.copy_(total.view(part.shape))
        return gradients

    def take(self, lr: float, factor: float) -> None:
        for _, parameter in self._parameters:
            assert isinstance(parameter.grad, DTensor)
            parameter.grad.to_local().mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def skip(self) -> None:
        for compression in self._compressions:
            compression.skip()
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._parameters}

    def gradients(self) -> dict[str, Tensor]:
        raise UnsupportedError("FSDP shards gradients; use zero=0 to see them whole")

    def state(self) -> dict[str, Tensor]:
        state = {
            f"{name}.{key}": tensor
            for name, p in self._parameters
            for key, tensor in self._optimizer.state[p].items()
        }
        # Every rank has residuals of its own.
        for i, compression in enumerate(self._compressions):
            kept = compression.state_dict()
            state |= {f"rank{dist.get_rank()}.stage{i}.{name}": tensor for name, tensor in kept.items()}
        return state

    def weights_changed(self) -> None:
        pass

    def state_changed(self) -> None:
        pass


def _send_bf16(stage: Stage, hook: Hook) -> None:
    if hook.kind != "bf16":
        raise UnsupportedError(f"hook {hook.kind} is for DistributedDataParallel; under FSDP2 there is bf16")
    sharded: list[Any] = [module for module in stage.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_custom_all_gather(Bf16AllGather())
        module.set_custom_reduce_scatter(Bf16ReduceScatter())


def _on_tp_mesh(local: Tensor, split: int | None, mesh: DeviceMesh) -> Tensor:
    """The full parameter of which ``local`` is this tp rank's part, as a DTensor that shares its memory."""
    if split is None:
        return local
    return DTensor.from_local(local, mesh["tp"], [Shard(split)], run_check=False)


def _shard_stage(stage: Stage, mesh: DeviceMesh, config: TrainConfig) -> None:
    if axis_group(mesh, "tp") is not None:
        # FSDP2 has to know which parameters are split over tp already.
        for name, split in stage.shards.items():
            owner, _, attribute = name.rpartition(".")
            module = stage.get_submodule(owner)
            local = getattr(module, attribute).detach()
            setattr(module, attribute, nn.Parameter(_on_tp_mesh(local, split, mesh)))
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    units: list[Any] = [stage, *stage.blocks.values()]
    for module in reversed(units):
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=config.zero == 3, mp_policy=precision)
    # A unit's parameters are gathered while the one before it computes. On a GPU a stream does that; on the CPU gathers
    # have to be asynchronous, and in the forward pass told in advance.
    units[0]._set_unshard_async_op(True)
    for module, following in pairwise(units):
        module.set_modules_to_forward_prefetch([following])
