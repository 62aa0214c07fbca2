"""What a comparison runs: the same training under several policies, in alternating blocks of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import LayoutError, SpecError
from ..train.config import TrainConfig
from .scheme import PLAIN, scheme

DEFAULT_POLICIES = (
    "none",
    "bf16",
    "naive-mpc",
    "naive-zfp:8",
    "naive-zfp:16",
    "mzhybrid",
    "zhybrid",
    "balanced",
)


@dataclass(frozen=True)
class Plan:
    """One comparison.

    config: of every run; its seed is replaced by each of ``seeds``. preset: the name of its model. policies:
    what takes part, see :func:`.scheme.scheme`. block: steps of one policy before the next one's turn; the first
    block of each is warm-up and not timed. zero_steps: timed steps of the zero-communication run, spread over the blocks.
    eval_every: steps between evaluations; one more follows the last step. save_every: blocks between
    checkpoints.
    """

    config: TrainConfig
    preset: str
    policies: tuple[str, ...] = DEFAULT_POLICIES
    seeds: tuple[int, ...] = (0,)
    block: int = 5
    zero_steps: int = 40
    eval_every: int = 100
    save_every: int = 10

    def __post_init__(self) -> None:
        if len(set(self.policies)) < len(self.policies) or not self.policies:
            raise SpecError(f"policies {', '.join(self.policies)}: at least one, each once")
        for found in map(scheme, self.policies):
            if found.hook is not None and not (
                self.config.ddp or (self.config.zero >= 2 and found.hook.kind == "bf16")
            ):
                raise LayoutError(
                    f"{found.name}: hooks need DistributedDataParallel (--ddp), bf16 FSDP2 (--zero 2 or 3); ZeRO-"
                    f"{self.config.zero} here has buckets of its own"
                )
        if self.block < 2 or self.config.steps < 2 * self.block:
            raise SpecError(
                f"{self.config.steps} steps in blocks of {self.block}: the first block is warm-up, so at least "
                "two blocks of two steps are needed"
            )

    @property
    def resumable(self) -> bool:
        """Whether an unfinished run can go on where it was: not under DDP, nor with PyTorch's own groups."""
        return not self.config.ddp and not any(name.partition(":")[0] == PLAIN for name in self.policies)

    def blocks(self) -> Iterator[tuple[int, range]]:
        """(index, steps) of each block."""
        for index, start in enumerate(range(0, self.config.steps, self.block)):
            yield index, range(start, min(start + self.block, self.config.steps))

    def zero_block(self, index: int) -> bool:
        """Whether the zero-communication run has a turn in block ``index``: the first, then evenly spread."""
        count = -(-self.config.steps // self.block)
        wanted = min(1 + -(-self.zero_steps // self.block), count)
        return index == 0 or (index * (wanted - 1)) // (count - 1) > ((index - 1) * (wanted - 1)) // (
            count - 1
        )

    def order(self, index: int, names: tuple[str, ...]) -> list[str]:
        """The policies' turns in a block; each block starts with another one, so that none always follows the same."""
        shift = index % len(names)
        return [*names[shift:], *names[:shift]]

    def identity(self) -> dict[str, Any]:
        """What must be equal for runs to be shown in one result."""
        record = dataclasses.asdict(self.config)
        del record["seed"]
        if not record["ddp"]:
            del record["ddp"]  # as results had it before there was a choice
        if record["degrees"] is None:
            del record["degrees"]
        return record
