"""Replicas as most people train them: PyTorch's ``DistributedDataParallel``, with thinwire's hook or another."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import LayoutError, UnsupportedError
from thinwire.group import ThinwireGroup
from thinwire.integrate.ddp import compress_ddp

from .config import TrainConfig
from .model import Stage
from .optim import adamw_of
from .plain import Hook
from .update import Gradient


class DdpUpdate:
    """ZeRO-0 under ``DistributedDataParallel``.

    group: of the data-parallel ranks. hook: one of PyTorch's own; None: ``compress_ddp`` over a thinwire group, DDP as it is
    over another. There are no checkpoints: buckets are made anew after the first step, so a resumed run would not be the
    same bit for bit.
    """

    def __init__(
        self, stage: Stage, group: dist.ProcessGroup | None, config: TrainConfig, hook: Hook | None
    ) -> None:
        if group is None or config.precision != "fp32" or config.stages > 1 or config.layout.tp > 1:
            raise LayoutError(
                f"layout {config.layout}, precision {config.precision}: DistributedDataParallel is run with two or more "
                "ranks of dp, tp=1, pp=1, fp32"
            )
        one = hook is not None and hook.one_bucket
        self._model = DistributedDataParallel(
            stage,
            process_group=group,
            bucket_cap_mb=(1 << 20) if one else config.bucket_bytes / (1 << 20),
            gradient_as_bucket_view=True,
        )
        if hook is not None:
            hook.register(self._model, group)
        elif isinstance(group, ThinwireGroup):
            compress_ddp(self._model)
        self._parameters = list(stage.named_parameters())
        self._owns_copy = group.rank() == 0
        self._optimizer = adamw_of([p for _, p in self._parameters], config.optimizer, fused=True)

    def wrapped(self, stages: Mapping[int, Stage]) -> dict[int, nn.Module]:
        return {0: self._model}

    def start(self, micro_batches: int, scale: float) -> None:
        self._optimizer.zero_grad()

    def finish(self) -> list[Gradient]:
        return [Gradient(tensor, self._owns_copy) for tensor in self.gradients().values()]

    def take(self, lr: float, factor: float) -> None:
        for tensor in self.gradients().values():
            tensor.mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def skip(self) -> None:
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._parameters}

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._parameters if p.grad is not None}

    def state(self) -> dict[str, Tensor]:
        raise UnsupportedError(
            "a run under DistributedDataParallel writes no checkpoint here; leave ddp off to have one"
        )

    def weights_changed(self) -> None:
        pass

    def state_changed(self) -> None:
        pass
