"""Over how many ranks parameters, gradients and optimizer state are cut: each has a degree of its own.

A degree of 1 is a replica on every rank, one of the number of ranks is all of it cut. Degrees nest: params | grads | optim
| ranks, so that what a rank holds of one is inside of what it holds of the one before. That covers ZeRO-1, 2 and 3
(Rajbhandari et al. 2020), HSDP, three levels (2, 8, N) as on Frontier, and what AMSP (arXiv 2311.00257) searches; with the
secondary copy of ZeRO++ (arXiv 2306.10209), which serves the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..errors import LayoutError, nearest


@dataclass(frozen=True)
class ShardingDegrees:
    """Ranks over which each kind of state is cut. Frozen.

    params: the 16-bit (or whatever the model computes in) parameters; gathered before each pass over a unit. grads: the
    sums of gradients over micro-batches. optim: fp32 masters and what the optimizer keeps. secondary: of the copy
    that the forward pass leaves for the backward pass; None: there is none, and both gather from ``params``.
    """

    params: int = 1
    grads: int = 1
    optim: int = 1
    secondary: int | None = None

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> ShardingDegrees:
        """Read ``{params = 2, grads = 8, optim = 64}``. Raises LayoutError for another key or what is no whole number."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name, value in table.items():
            if name not in names:
                raise LayoutError(f"degrees: unknown key {name!r}; {nearest(name, names)}")
            if type(value) is not int:
                raise LayoutError(f"degrees: {name} = {value!r} is not a whole number")
        return cls(**table)

    @classmethod
    def parse(cls, text: str) -> ShardingDegrees:
        """Read ``"params=2,grads=8,optim=64"``: any order, what is left out is 1. Raises LayoutError for anything else."""
        table: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, value = (s.strip() for s in part.partition("="))
            if not equals or not value.isdecimal() or name in table:
                raise LayoutError(f"{part!r} in degrees {text!r}: write NAME=RANKS, each name once")
            table[name] = int(value)
        return cls.from_table(table)

    def __str__(self) -> str:
        text = f"params={self.params},grads={self.grads},optim={self.optim}"
        return text if self.secondary is None else f"{text},secondary={self.secondary}"

    def check(self, world: int, ranks_per_host: int) -> None:
        """Raise LayoutError if these cannot be the degrees of ``world`` ranks, so many of which share a host."""
        chain = {"params": self.params, "grads": self.grads, "optim": self.optim, "ranks": world}
        for name, degree in chain.items():
            if degree < 1:
                raise LayoutError(f"degrees {self}: {name}={degree} must be at least 1")
        names = list(chain)
        for inner, outer in pairwise(names):
            if chain[outer] % chain[inner]:
                raise LayoutError(
                    f"degrees {self} do not nest: {inner}={chain[inner]} does not divide {outer}={chain[outer]}; needed is "
                    f"params | grads | optim | {world} ranks"
                )
        if self.secondary is None:
            return
        if self.secondary < 1 or self.params % self.secondary:
            raise LayoutError(
                f"degrees {self} do not nest: secondary={self.secondary} does not divide params={self.params}"
            )
        if ranks_per_host % self.secondary:
            raise LayoutError(
                f"degrees {self}: secondary={self.secondary} is not inside a host, which has {ranks_per_host} rank(s); the "
                f"copy is there so that the backward pass stays on the host: give a divisor of {ranks_per_host}"
            )

    def levels(self, world: int, ranks_per_host: int) -> list[int]:
        """The degrees between which messages go, from 1 to ``world``, ascending.

        A host is one of them where it nests with all others: messages then go inside hosts first, between them with what
        is left. (Copies of the optimizer's state are reduced in one go.)
        """
        levels = {1, self.params, self.grads, self.optim, world, self.secondary or 1}
        nests = all(level % ranks_per_host == 0 or ranks_per_host % level == 0 for level in levels)
        if nests and ranks_per_host < self.optim:
            levels.add(ranks_per_host)
        return sorted(levels)

    def memory_nbytes(self, numel: int, *, itemsize: int = 2, gradient_itemsize: int = 2) -> dict[str, float]:
        """Bytes that a rank holds of a model of ``numel`` parameters, by kind. Itemsizes: of parameters and of gradients.

        optim: masters and the two moments of Adam, fp32.
        """
        return {
            "params": itemsize * numel / self.params,
            "grads": gradient_itemsize * numel / self.grads,
            "optim": 12 * numel / self.optim,
            "secondary": itemsize * numel / self.secondary if self.secondary is not None else 0.0,
        }

    def micro_batch_nbytes(self, w: float) -> dict[str, float]:
        """Bytes that a rank sends in a micro-batch for a model of ``w`` bytes, uncompressed, by what for."""
        backward = self.params if self.secondary is None else self.secondary
        return {
            "gather": w * (1 - 1 / self.params) + w * (1 - 1 / backward),
            "reduce": w * (1 - 1 / self.grads),
        }

    def step_nbytes(self, w: float, world: int) -> dict[str, float]:
        """Bytes that a rank sends once in a step, uncompressed, by what for."""
        return {
            "reduce": w / self.grads * (1 - self.grads / self.optim),
            "replicas": 2 * w / self.optim * (1 - self.optim / world),
            "gather": w / self.params * (1 - self.params / self.optim),
        }
