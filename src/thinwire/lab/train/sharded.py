"""Training with independent degrees of sharding: :class:`thinwire.ShardedModel` under the trainer."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn

from thinwire.errors import LayoutError, UnsupportedError
from thinwire.integrate.degrees import ShardingDegrees
from thinwire.integrate.ladder import Ladder
from thinwire.integrate.sharded import ShardedModel
from thinwire.integrate.sharding import Sharding, list_shardings, sharding
from thinwire.policy import Policy

from ..wiring import Wiring
from .config import TrainConfig
from .layout import Layout
from .model import Stage
from .optim import make_adamw
from .update import Gradient


def is_sharding(spec: str) -> bool:
    """Whether a policy's name is that of a sharding scheme, with a policy behind it or not (``zero3:bf16``)."""
    return spec.partition(":")[0] in list_shardings()


def sharding_of(
    spec: str | Policy, degrees: ShardingDegrees | None, layout: Layout, ranks_per_host: int | None
) -> Sharding | None:
    """The scheme that ``spec`` names, or its policy with ``degrees``; None: neither says that state is cut by degrees.

    Raises LayoutError for degrees, or axes beside dp, that do not go together.
    """
    if isinstance(spec, str) and is_sharding(spec):
        if degrees is not None:
            raise LayoutError(
                f"{spec} has degrees of its own: leave out degrees {degrees}, or give them a policy"
            )
        found = sharding(spec, layout.world, ranks_per_host)
    elif degrees is None:
        return None
    else:
        found = Sharding.of(degrees, spec)
    if layout.world > layout.dp:
        raise LayoutError(f"layout {layout}: degrees of sharding cut over dp alone; use tp=1, pp=1")
    found.degrees.check(layout.dp, layout.dp if ranks_per_host is None else ranks_per_host)
    return found


def build_ladder(found: Sharding, wiring: Wiring, seed: int) -> Ladder:
    """Its groups on a cluster. All ranks call it."""
    return Ladder(
        found,
        ranks_per_host=wiring.ranks_per_host,
        seed=seed,
        backend=wiring.backend,
        options=wiring.options,
    )


class ShardedUpdate:
    """Parameters, gradients and optimizer state cut by ``ladder``'s degrees; a unit for each block and for both ends."""

    def __init__(self, stage: Stage, ladder: Ladder, config: TrainConfig) -> None:
        dimensions = {name: p.ndim for name, p in stage.named_parameters()}
        ends = [part for part in (stage.embedding, stage.head) if part is not None]
        self._model = ShardedModel(
            stage,
            ladder,
            [*ends, *stage.blocks.values()],
            labels=lambda name: dimensions[name] > 1,
            rollback=True,  # any precision can overflow, and a residual must not keep what was skipped
        )
        self._optimizer = make_adamw(
            self._model.masters(True), self._model.masters(False), config.optimizer, fused=True
        )
        self._counted = ladder.replica == 0
        self._whole: dict[str, Tensor] = {}

    def wrapped(self, stages: Mapping[int, Stage]) -> dict[int, nn.Module]:
        return dict(stages)

    def start(self, micro_batches: int, scale: float) -> None:
        self._model.start(scale)

    def finish(self) -> list[Gradient]:
        self._model.finish()
        return [Gradient(total, self._counted) for total in self._model.gradients()]

    def take(self, lr: float, factor: float) -> None:
        for total in self._model.gradients():
            total.mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._model.commit()

    def skip(self) -> None:
        self._model.skip()

    def weights(self) -> dict[str, Tensor]:
        self._whole = self._model.parameters()
        return self._whole

    def gradients(self) -> dict[str, Tensor]:
        raise UnsupportedError("gradients are cut; use zero=0 to see them whole")

    def state(self) -> dict[str, Tensor]:
        state = self._model.state_dict()
        for i, master in enumerate(self._model.masters()):
            for key, tensor in self._optimizer.state[master].items():
                state[f"master{i}.{key}"] = tensor
        return {f"rank{dist.get_rank()}.{name}": tensor for name, tensor in state.items()}

    def weights_changed(self) -> None:
        self._model.load_parameters(self._whole)

    def state_changed(self) -> None:
        self._model.rebuild()
