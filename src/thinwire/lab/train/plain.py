"""PyTorch's own ways to send less, to compare with: hooks of DistributedDataParallel, and bf16 messages under FSDP2.

They are used as PyTorch's documentation says, at the settings that serve them best over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import SpecError
from thinwire.integrate.fsdp import Allocates
from thinwire.torch_names import all_gather_single, reduce_scatter_single

_KINDS = ("bf16", "fp16", "powersgd")


@dataclass(frozen=True)
class Hook:
    """kind: bf16, fp16 or powersgd; rank: of powersgd's factors."""

    kind: str
    rank: int = 4

    @classmethod
    def parse(cls, text: str) -> Hook:
        """Read ``bf16``, ``fp16``, ``powersgd`` or ``powersgd=RANK``. Raises SpecError for anything else."""
        kind, equals, rank = text.partition("=")
        if kind not in _KINDS or (equals and (kind != "powersgd" or not rank.isdecimal() or int(rank) < 1)):
            raise SpecError(f"hook {text!r} is not one of bf16, fp16, powersgd, powersgd=RANK")
        return cls(kind, int(rank)) if equals else cls(kind)

    @property
    def one_bucket(self) -> bool:
        """PowerSGD's hook ends in a mismatch of collectives over gloo with more than one."""
        return self.kind == "powersgd"

    def register(self, model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        """Give the hook to ``model``, whose gradients are averaged over ``group``."""
        if self.kind == "powersgd":
            # 2: as early as error feedback and warm start allow; 1000 steps of all-reduce come first by default.
            state = PowerSGDState(group, matrix_approximation_rank=self.rank, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook)
        else:
            hooks: dict[str, Callable[..., Any]] = {"bf16": bf16_hook, "fp16": fp16_compress_hook}
            model.register_comm_hook(group, hooks[self.kind])


def bf16_hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with the types themselves
    """Average a bucket in bf16. PyTorch's hook of that name refuses gloo by its name; this is what it consists of."""
    buffer = bucket.buffer()
    half = buffer.to(torch.bfloat16).div_(group.size())

    def widen(future: Future[Any]) -> Tensor:
        return buffer.copy_(future.value()[0])  # type: ignore[no-any-return]

    return dist.all_reduce(half, group=group, async_op=True).get_future().then(widen)


class _Widened(dist.Work):
    """A gather under way: who waits for it gets the values in the dtype of ``output``."""

    def __init__(self, work: dist.Work, half: Tensor, output: Tensor) -> None:
        super().__init__()
        self._work, self._half, self._output = work, half, output

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait() if timeout is None else self._work.wait(timeout)
        self._output.copy_(self._half)
        return True


class Bf16AllGather(Allocates):
    """FSDP2's all-gather with bf16 messages, for ``set_custom_all_gather``; it travels while the layer before computes."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        half = torch.empty_like(output_tensor, dtype=torch.bfloat16)
        work = all_gather_single(half, input_tensor.to(torch.bfloat16), group=group, async_op=True)
        return _Widened(work, half, output_tensor)


class Bf16ReduceScatter(Allocates):
    """FSDP2's reduce-scatter with bf16 messages, for ``set_custom_reduce_scatter``."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        half = torch.empty_like(output_tensor, dtype=torch.bfloat16)
        reduce_scatter_single(half, input_tensor.to(torch.bfloat16), op=op, group=group)
        output_tensor.copy_(half)
        return None
