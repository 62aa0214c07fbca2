"""The groups of sharded state: a rung between each two degrees that nest, climbed by sums, descended by gathers.

At degree ``d`` a rank holds one of ``d`` equal parts of a flat tensor. A rung from degree ``low`` to degree ``high`` is a
group of ``high / low`` ranks that hold the same part at ``low`` and one each of its parts at ``high``. Reduce-scattering
over one rung after the other ends where reduce-scattering over all their ranks would, and sends as many bytes; but the first
rungs are inside hosts, so only what is left of the message goes between them. So it is with gathers, the other way.

Neighbours are in the lowest rungs. A rung has two groups, since gathers and sums run at the same time and each group's
messages have an order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .. import collectives as c
from ..codecs import Codec
from ..collectives.frames import equal_parts
from ..collectives.options import CallOptions, derive_seed
from ..collectives.traffic import Message
from ..collectives.transport import Metered
from ..errors import LayoutError, UnsupportedError
from ..feedback import Feedback, Span
from ..group import BACKEND, GroupOptions, ThinwireGroup
from ..policy import NONE, AxisPolicy, Policy
from ..torch_names import all_gather_single, reduce_scatter_single
from . import reductions
from .mesh import DP_AXES, DP_ROLES
from .sharding import Sharding

Residuals = dict[str, Feedback]
"""What rungs keep for a tensor, by ``OP.DEGREE``."""


@dataclass(frozen=True)
class Rung:
    """The ranks between two degrees. inside: they share a host. index: this rank's part, of ``high / low``."""

    low: int
    high: int
    inside: bool
    index: int
    gathers: ThinwireGroup
    sums: ThinwireGroup

    @property
    def size(self) -> int:
        return self.high // self.low


class Ladder:
    """Makes the groups of a sharding scheme; every rank of the default group makes it at the same time.

    ranks_per_host: neighbours in rank that share a host; None: all of them. Inside of a host the scheme's ``inside`` policy
    is used, between hosts its ``policy``. backend: a name given to :func:`thinwire.group.register`. options: inner backend,
    time-out and what else the groups share. Raises LayoutError for degrees that do not fit.
    """

    def __init__(
        self,
        sharding: Sharding,
        *,
        ranks_per_host: int | None = None,
        device_type: str = "cpu",
        seed: int = 0,
        backend: str = BACKEND,
        options: GroupOptions = GroupOptions(),
    ) -> None:
        self.world, self.rank, self.seed = dist.get_world_size(), dist.get_rank(), seed
        self.sharding, self.degrees = sharding, sharding.degrees
        per_host = self.world if ranks_per_host is None else ranks_per_host
        if per_host < 1 or self.world % per_host:
            raise LayoutError(f"{self.world} ranks are not {per_host} on each host")
        self.degrees.check(self.world, per_host)
        levels = self.degrees.levels(self.world, per_host)
        spans = [*pairwise(levels)]
        insides = [per_host % high == 0 for _, high in spans]
        common = replace(
            options, op_axes=DP_AXES, op_roles=DP_ROLES, feedback_by_caller=True, inline=True, seed=seed
        )
        made: dict[str, list[Any]] = {}
        for use in ("gathers", "sums"):
            names = [f"zero_{use}_{high}" for _, high in spans]
            override: Mapping[str, Any] = {
                name: (
                    backend,
                    replace(common, policy=sharding.inside if inside else sharding.policy, axis="dp"),
                )
                for name, inside in zip(names, insides, strict=True)
            }
            # Outermost first, as the mesh wants it.
            shape = [high // low for low, high in spans]
            if spans:
                mesh = init_device_mesh(
                    device_type,
                    tuple(reversed(shape)),
                    mesh_dim_names=tuple(reversed(names)),
                    backend_override=override,  # type: ignore[arg-type]
                )
                made[use] = [mesh.get_group(name) for name in names]
        self.rungs = [
            Rung(low, high, inside, self.rank // low % (high // low), made["gathers"][i], made["sums"][i])
            for i, ((low, high), inside) in enumerate(zip(spans, insides, strict=True))
        ]
        self._check_policies()

    def groups(self) -> dict[str, ThinwireGroup]:
        """All groups by name."""
        return {
            f"{use}_{rung.high}": group
            for rung in self.rungs
            for use, group in (("gathers", rung.gathers), ("sums", rung.sums))
        }

    def wire_bytes(self, *, inside: bool) -> int:
        """Bytes that this rank has sent over the rungs inside its host, or over those between hosts."""
        rungs = [rung for rung in self.rungs if rung.inside == inside]
        entries = [e for r in rungs for g in (r.gathers, r.sums) for e in g.traffic.entries().values()]
        return sum(entry.tally.wire_bytes for entry in entries)

    def close(self) -> None:
        """End the groups."""
        for group in self.groups().values():
            dist.destroy_process_group(group)

    def begin(self, numel: int, degree: int) -> int:
        """Where this rank's part at ``degree`` begins in a flat tensor of ``numel`` values."""
        below = [rung for rung in self.rungs if rung.high <= degree]
        return sum(rung.index * (numel // rung.high) for rung in below)

    @property
    def replica(self) -> int:
        """Which copy of the optimizer state this rank has: of the ranks that hold the same, the first has 0."""
        return self.rank // self.degrees.optim

    def gather(
        self, part: Tensor, high: int, low: int, *, seed: tuple[int, ...], into: Tensor | None = None
    ) -> Tensor:
        """This rank's part at degree ``low`` from every rank's part at ``high``, each as it was decoded. Waits.

        part: flat; the dtype stays. seed: of stochastic rounding, as the number of the step: what it is derived from is
        the same for all ranks that encode the same values. into: where the result goes, if it is to be there.
        """
        for rung in reversed(self._between(low, high)):
            last = into is not None and rung.low == low
            out = into if into is not None and last else part.new_empty(part.numel() * rung.size)
            self._gather(rung, part, out, seed)
            part = out
        if into is not None and part is not into:
            into.copy_(part)
        return part

    def gather_exact(self, part: Tensor, high: int, low: int) -> Tensor:
        """As :meth:`gather`, every bit as it is, whatever the policies say."""
        words = part.view(torch.uint8)  # gloo has no 16-bit integers
        for rung in reversed(self._between(low, high)):
            out = words.new_empty(words.numel() * rung.size)
            all_gather_single(out, words, group=rung.gathers)
            words = out
        return words.view(part.dtype)

    def reduce(
        self, values: Tensor, low: int, high: int, residuals: Residuals, *, seed: tuple[int, ...]
    ) -> Tensor:
        """This rank's part at ``high`` of the sum of ``values``, its part at ``low``, over the ranks between. Waits.

        values: flat; the dtype stays; may be changed. residuals: see :meth:`residuals`.
        """
        for rung in self._between(low, high):
            out = values.new_empty(values.numel() // rung.size)
            self._reduce(rung, values, out, residuals.get(f"reduce_scatter.{rung.high}"), seed)
            values = out
        return values

    def all_reduce(self, values: Tensor, low: int, residuals: Residuals, *, seed: tuple[int, ...]) -> None:
        """Replace ``values``, this rank's part at ``low``, by their sum over all ranks that hold this part. Waits."""
        for rung in self._between(low, self.world):
            codec, policy, message = rung.sums.look_up(
                "all_reduce", values.dtype, values.nbytes, role="gradient"
            )
            if codec == NONE:
                with rung.sums.role("gradient"):
                    dist.all_reduce(values, group=rung.sums)
                continue
            options = self._options(rung.sums, policy, message, (*seed, rung.high, self.rank % rung.low))
            states = residuals.get(f"all_reduce.{rung.high}"), None

            def call(
                transport: Metered, codec: Codec = codec, states: Any = states, o: Any = options
            ) -> None:
                reductions.all_reduce(values, codec, states, transport, o)

            rung.sums.submit(message, call, values).wait()

    def residuals(self, name: str, numel: int, dtype: torch.dtype, *, rollback: bool) -> Residuals:
        """Zero residuals of a unit's gradient of ``numel`` values, where the policies ask for error feedback.

        Each rung's are as long as what it sends; those of an all-reduce hold the second encoding's, too.
        """
        found: Residuals = {}
        for rung in self.rungs:
            all_reduced = rung.low >= self.degrees.optim
            op = "all_reduce" if all_reduced else "reduce_scatter"
            length = numel // (self.degrees.optim if all_reduced else rung.low)
            codec, policy, _ = rung.sums.look_up_gradient(op, dtype, length * dtype.itemsize)
            assert isinstance(codec, Codec)  # see _check_policies
            if not policy.feedback or codec.lossless:
                continue
            start = stop = 0
            if all_reduced and rung.size > 1:
                start, stop = c.Chunks.of(length, rung.size, codec.granule).bounds(rung.index)
            found[f"{op}.{rung.high}"] = Feedback(
                [Span(name, 0, length)],
                length,
                axis=f"dp.{rung.high}",
                owner_numel=stop - start,
                owner_begin=start,
                rollback=rollback,
            )
        return found

    def _between(self, low: int, high: int) -> list[Rung]:
        return [rung for rung in self.rungs if low <= rung.low and rung.high <= high]

    def _gather(self, rung: Rung, part: Tensor, out: Tensor, seed: tuple[int, ...]) -> None:
        codec, policy, message = rung.gathers.look_up("all_gather", out.dtype, out.nbytes, role="parameter")
        if codec == NONE:
            with rung.gathers.role("parameter"):
                all_gather_single(out, part, group=rung.gathers)
            return
        # Not of the group: copies of a part in other groups are encoded to the same bytes.
        options = self._options(rung.gathers, policy, message, (*seed, rung.high, self.rank % rung.low))
        outs = equal_parts(out, rung.size)
        rung.gathers.submit(message, lambda t: c.all_gather(part, outs, codec, t, options), out).wait()

    def _reduce(
        self, rung: Rung, values: Tensor, out: Tensor, feedback: Feedback | None, seed: tuple[int, ...]
    ) -> None:
        codec, policy, message = rung.sums.look_up(
            "reduce_scatter", values.dtype, values.nbytes, role="gradient"
        )
        if codec == NONE:
            with rung.sums.role("gradient"):
                reduce_scatter_single(out, values, op=dist.ReduceOp.SUM, group=rung.sums)
            return
        # Of the group: ranks that send to other owners round by other numbers.
        first = self.rank - self.rank % rung.high + self.rank % rung.low
        options = self._options(rung.sums, policy, message, (*seed, rung.high, first))
        residual = None if feedback is None else feedback.sender

        def call(transport: Metered) -> None:
            reductions.coded_reduce_scatter(values, out, codec, residual, transport, options)

        rung.sums.submit(message, call, out).wait()

    def _options(
        self, group: ThinwireGroup, policy: AxisPolicy, message: Message, seed: tuple[int, ...]
    ) -> CallOptions:
        return group.call_options(policy, message, seed=derive_seed(self.seed, *seed))

    def _check_policies(self) -> None:
        """Raise UnsupportedError for what cut state does not allow."""
        for rung in self.rungs:
            policy: Policy = rung.sums.policy
            for choice in policy.axis("dp").choices():
                for codec in choice.codecs():
                    if not isinstance(codec, Codec):
                        raise UnsupportedError(
                            f"policy {policy.name}, axis dp: {codec} needs whole matrices, and sharded state sends parts of "
                            "flat units; use a codec, or thinwire.GradientSync"
                        )
            if rung.high <= self.degrees.params and policy.axis("zero").difference:
                raise UnsupportedError(
                    f"policy {policy.name}, axis zero: differences need the parameters that were sent last, and those that "
                    f"are gathered for a pass (degree {rung.high} of params={self.degrees.params}) are freed after it; use "
                    "difference = false, or a degree of params inside a host, where the policy for messages inside holds"
                )


def padded(numel: int, degree: int) -> int:
    """The least multiple of ``degree`` that is not less than ``numel``."""
    return math.ceil(numel / degree) * degree
