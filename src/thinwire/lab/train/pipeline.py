"""Forward and backward over the micro-batches of a step: a plain loop, or one of torch's pipeline schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from thinwire.integrate.pipeline import PipelineStage
from thinwire.integrate.roles import role_tag

from .model import ModelConfig

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits, targets) -> mean loss of a micro-batch."""


class Schedule(NamedTuple):
    """A schedule: torch's class, stages on each rank, and whether they run there and back (a V)."""

    kind: Any
    stages_per_rank: int
    back: bool = False


SCHEDULES = {
    "gpipe": Schedule(ScheduleGPipe, 1),
    "1f1b": Schedule(Schedule1F1B, 1),
    "interleaved": Schedule(ScheduleInterleaved1F1B, 2),
    "zero-bubble": Schedule(ScheduleInterleavedZeroBubble, 2),
    "zbv": Schedule(ScheduleZBVZeroBubble, 2, back=True),
}


def stages_of(schedule: str, rank: int, ranks: int) -> list[int]:
    """The stages on pipeline rank ``rank``, in order."""
    if ranks == 1:
        return [0]
    s = SCHEDULES[schedule]
    if s.back:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + i * ranks for i in range(s.stages_per_rank)]


def layers_of(stage: int, stages: int, layers: int) -> range:
    """The layers of a stage: as even as possible, consecutive."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)


class Runner(ABC):
    """Runs the micro-batches of a step over this rank's stages. ``scale`` multiplies every gradient."""

    def __init__(self, loss: Loss, micro_batches: int) -> None:
        self._loss = loss
        self._count = micro_batches
        self._factor = 1.0  # loss scale / micro-batches: gradients add up to a mean

    def forward_backward(self, inputs: Tensor, targets: Tensor, scale: float = 1.0) -> list[float]:
        """One step's passes over (sequences, sequence) tokens; the micro-batches' losses, [] off the last stage."""
        self._factor = scale / self._count
        return [loss / self._factor for loss in self._train(inputs, targets)]

    def forward(self, inputs: Tensor, targets: Tensor) -> list[float]:
        """The losses alone."""
        self._factor = 1.0
        with torch.no_grad():
            return self._evaluate(inputs, targets)

    def _scaled_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self._loss(logits, targets) * self._factor

    @abstractmethod
    def _train(self, inputs: Tensor, targets: Tensor) -> list[float]: ...

    @abstractmethod
    def _evaluate(self, inputs: Tensor, targets: Tensor) -> list[float]: ...


class LoopRunner(Runner):
    """pp=1: one micro-batch after the other."""

    def __init__(self, stage: nn.Module, loss: Loss, micro_batches: int) -> None:
        super().__init__(loss, micro_batches)
        self._stage = stage

    def _train(self, inputs: Tensor, targets: Tensor) -> list[float]:
        losses = []
        pairs = list(zip(inputs.chunk(self._count), targets.chunk(self._count), strict=True))
        for i, (tokens, following) in enumerate(pairs):
            last = i == len(pairs) - 1
            if isinstance(self._stage, FSDPModule):
                self._stage.set_requires_gradient_sync(last)
            ddp = self._stage if isinstance(self._stage, DistributedDataParallel) else None
            with ddp.no_sync() if ddp is not None and not last else nullcontext():
                loss = self._scaled_loss(self._stage(tokens), following)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        return losses

    def _evaluate(self, inputs: Tensor, targets: Tensor) -> list[float]:
        pairs = zip(inputs.chunk(self._count), targets.chunk(self._count), strict=True)
        return [self._scaled_loss(self._stage(x), y).item() for x, y in pairs]


class PipelineRunner(Runner):
    """pp>1: one of ``SCHEDULES``."""

    def __init__(
        self,
        stages: dict[int, nn.Module],
        total: int,
        schedule: str,
        group: dist.ProcessGroup,
        loss: Loss,
        micro_batches: int,
        activation: Tensor,
        logits: Tensor,
    ) -> None:
        """stages: this rank's, by index out of ``total``. activation, logits: examples of what stages give."""
        super().__init__(loss, micro_batches)
        tokens = torch.zeros(activation.shape[:2], dtype=torch.int64)
        # Shapes are given, so that no rank has to send them before the first step.
        parts = [
            PipelineStage(
                module,
                index,
                total,
                torch.device("cpu"),
                input_args=tokens if index == 0 else activation,
                output_args=logits if index == total - 1 else activation,
                group=group,
            )
            for index, module in stages.items()
        ]
        self._stages = stages
        self._total = total
        self._is_last = total - 1 in stages
        self._group = group
        self._activation = activation.detach()
        self._owner = {s: r for r in range(group.size()) for s in stages_of(schedule, r, group.size())}
        s = SCHEDULES[schedule]
        # The loss has the factor for micro-batches already: gradients travel before a schedule would scale them.
        self._schedule = s.kind(
            parts if s.stages_per_rank > 1 else parts[0],
            micro_batches,
            loss_fn=self._scaled_loss,
            scale_grads=False,
        )

    def _train(self, inputs: Tensor, targets: Tensor) -> list[float]:
        losses: list[Tensor] = []
        self._schedule.step(
            *((inputs,) if 0 in self._stages else ()),
            target=targets if self._is_last else None,
            losses=losses if self._is_last else None,
            return_outputs=False,
        )
        return [loss.item() for loss in losses]

    def _evaluate(self, inputs: Tensor, targets: Tensor) -> list[float]:
        # Stage by stage; the schedules' own forward-only mode fails where a rank holds neighbouring stages.
        losses: list[float] = []
        sends: list[Any] = []
        tag = role_tag("activation")
        outputs: list[Tensor] = []
        for index, module in self._stages.items():
            if index == 0:
                outputs = list(inputs.chunk(self._count))
            elif index - 1 not in self._stages:
                outputs = [torch.empty_like(self._activation) for _ in range(self._count)]
            following = targets.chunk(self._count)
            for i, x in enumerate(outputs):
                if index > 0 and index - 1 not in self._stages:
                    dist.recv(x, group=self._group, group_src=self._owner[index - 1], tag=tag)
                outputs[i] = module(x)
                if index == self._total - 1:
                    losses.append(self._scaled_loss(outputs[i], following[i]).item())
                elif index + 1 not in self._stages:
                    dst = self._owner[index + 1]
                    sends.append(dist.isend(outputs[i], group=self._group, group_dst=dst, tag=tag))
        for work in sends:
            work.wait()
        return losses


def example_tensors(
    model: ModelConfig, micro_batch: int, vocab_part: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """An activation and logits of one micro-batch, as a pipeline's stages pass them."""
    shape = (micro_batch, model.sequence)
    return (
        torch.empty(*shape, model.hidden, dtype=dtype, requires_grad=True),
        torch.empty(*shape, vocab_part, dtype=dtype, requires_grad=True),
    )
