"""How many ranks each axis has, and whether a model and a batch can be split that way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.errors import LayoutError

if TYPE_CHECKING:
    from .config import TrainConfig

AXES = ("pp", "dp", "tp")
"""From outermost to innermost. Tensor parallelism reduces twice per block, so its ranks are neighbours (one
host); a pipeline sends one activation per micro-batch and boundary, so it takes the longest way."""


@dataclass(frozen=True)
class Layout:
    """Ranks per axis: data (dp), tensor (tp) and pipeline (pp) parallelism."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise LayoutError(f"{axis}={getattr(self, axis)}: an axis has at least 1 rank")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``"dp=2,tp=2,pp=2"``: any order; an axis that is left out has one rank.

        Raises LayoutError for an unknown or repeated axis, or a size that is not a positive integer.
        """
        sizes: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            axis, equals, size = (s.strip() for s in part.partition("="))
            if axis not in AXES or not equals or not size.isdecimal():
                raise LayoutError(f"{part!r} in layout {text!r}: write AXIS=RANKS with an axis of dp, tp, pp")
            if axis in sizes:
                raise LayoutError(f"axis {axis} is given twice in layout {text!r}")
            sizes[axis] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        return f"dp={self.dp},tp={self.tp},pp={self.pp}"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp

    def mesh_sizes(self) -> dict[str, int]:
        """Mesh axes, outermost first: dp always, the others if they have more than one rank."""
        return {axis: getattr(self, axis) for axis in AXES if axis == "dp" or getattr(self, axis) > 1}


def check_layout(config: TrainConfig, world: int) -> None:
    """Raise LayoutError if the model, the batch or the schedule cannot be split over ``world`` ranks."""
    layout, model = config.layout, config.model
    if layout.world != world:
        raise LayoutError(
            f"layout dp={layout.dp} x tp={layout.tp} x pp={layout.pp} = {layout.world} ranks, "
            f"but {world} run: start {layout.world} ranks or change a factor"
        )
    if config.degrees is not None:
        if world > layout.dp:
            raise LayoutError(f"layout {layout}: degrees of sharding cut over dp alone; use tp=1, pp=1")
        config.degrees.check(world, world)
    for what, size in {"heads": model.heads, "hidden": model.hidden, "vocab": model.vocab}.items():
        if size % layout.tp:
            raise LayoutError(f"{what}={size} is not a multiple of tp={layout.tp}")
    if model.layers < config.stages:
        raise LayoutError(
            f"{model.layers} layers are fewer than {config.stages} pipeline stages "
            f"(pp={layout.pp} x {config.stages // layout.pp} per rank in schedule {config.schedule})"
        )
    share = layout.dp * config.micro_batch
    if config.global_batch % share:
        raise LayoutError(
            f"global_batch={config.global_batch} is not a multiple of dp={layout.dp} x "
            f"micro_batch={config.micro_batch} = {share}"
        )
    if layout.pp > 1:
        _check_schedule(config)


def _check_schedule(config: TrainConfig) -> None:
    count, pp = config.micro_batches, config.layout.pp
    if config.zero == 3 and config.schedule in ("zero-bubble", "zbv"):
        # Their separate weight gradients look for parameters that FSDP has taken away after the forward pass.
        raise LayoutError(
            f"zero=3 does not run under schedule {config.schedule}: use zero=2 or another schedule"
        )
    if config.schedule != "gpipe" and count < pp:
        raise LayoutError(
            f"schedule {config.schedule} needs at least pp={pp} micro-batches, not {count}: "
            "raise global_batch or lower micro_batch"
        )
    if config.schedule in ("interleaved", "zero-bubble") and count % (count // pp):
        raise LayoutError(
            f"schedule {config.schedule} with pp={pp} runs {count // pp} rounds, which do not divide "
            f"{count} micro-batches: use a multiple of {pp}"
        )
