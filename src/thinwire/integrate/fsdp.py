"""FSDP2 with error feedback: the two collectives of ``fully_shard``, by somebody who knows the parameters.

Without it FSDP2 runs over a thinwire group as it is, with any policy that asks for no feedback. ::

    dist.init_process_group("thinwire", pg_options=GroupOptions(policy="balanced", feedback_by_caller=True))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    compression = thinwire.compress_fsdp(model)

Gradients are reduce-scattered with the sender's residual, kept by parameter. Parameters are encoded from the shards, which
stay exact, so no error adds up; every rank computes with the decoded bits, the owner of a shard, too.

On a mesh of two dimensions (HSDP: ``init_mesh({"dp": replicas, "zero": shards})``) what was reduce-scattered is then
all-reduced between the replicas through the policy of their group, with residuals of its own, of this rank's part only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import collectives as c
from ..codecs import Codec, Compressor
from ..collectives.frames import equal_parts
from ..collectives.options import derive_seed
from ..collectives.transport import Metered
from ..errors import UnsupportedError
from ..feedback import take_back
from ..group import ThinwireGroup
from ..policy import NONE, AxisPolicy
from ..torch_names import all_gather_single, reduce_scatter_single
from . import reductions
from .fsdp_deferred import Deferred
from .fsdp_units import Member, Unit, columns, put, take, units_of
from .step_residuals import StepResiduals

# Parts of seeds; groups count their own calls under 0 and 1.
_GATHER, _REDUCE, _REPLICATE = 2, 3, 4
# A reduction must not wait for the parameters of the next layer, which FSDP gathers ahead.
_GATHER_LANE, _REDUCE_LANE = 0, 1


class FsdpCompression:
    """What compressed FSDP2 keeps from step to step: residuals by parameter name, and the number of steps.

    A step is what lies between the first forward pass after gradients were reduced and the next such pass; reduce them
    once in it (``set_requires_gradient_sync(False)`` for all micro-batches but the last). Stochastic rounding of parameters
    is the same in all gathers of a step, so that the backward pass sees what the forward pass saw.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        *,
        scale: Callable[[], float] | None,
        rollback: bool,
        residual_dtype: torch.dtype,
    ) -> None:
        self.group = units[0].group
        self._scale = scale
        self._residuals = StepResiduals(rollback=rollback or scale is not None, dtype=residual_dtype)
        self._reductions = 0  # of this step
        self._deferred = Deferred()
        self._step_scale = 1.0
        self._steps = torch.zeros(1, dtype=torch.int64)
        for unit in units:
            self._take_over(unit)
        # Before FSDP's own hook, which gathers the first parameters of the step.
        model.register_forward_pre_hook(lambda *_: self._end_step(), prepend=True)

    @property
    def nbytes(self) -> int:
        """Memory of residuals in bytes, copies for skipped steps included: all parameters', on every rank."""
        return self._residuals.nbytes

    def skip(self) -> None:
        """The step was not taken: residuals go back to what they were before it.

        Call it on every rank, before the next forward pass; not needed where ``scale`` tells it. Raises RuntimeError
        if no copies are kept (``rollback=True``).
        """
        self._residuals.undo()
        self._end_step()

    def state_dict(self) -> dict[str, Tensor]:
        """Residuals ``NAME@AXIS`` (flat) and ``steps``, sharing memory with the live ones. Ends the step.

        Between replicas: ``NAME.replica@AXIS``, of this rank's part, and ``NAME.replica.owner@AXIS`` for each unit. All
        are this rank's: in a distributed checkpoint, their names need the rank.
        """
        self._end_step()
        return {"steps": self._steps, **self._residuals.state_dict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take tensors back, by name. Raises CheckpointError for a missing one or another size."""
        remedy = "resume with the model and the policy that the checkpoint was written with"
        take_back(self.state_dict(), state, "FSDP compression state", remedy)

    def gather(
        self, unit: Unit, output: Tensor, shard: Tensor, group: Any, async_op: bool
    ) -> dist.Work | None:
        """Fill output (a message of parameters) with every rank's shard, which is this rank's part of it.

        FSDP waits for any Work that it gets before it uses what was gathered. On the CPU there always is one, so that
        gathers travel while the layer before computes.
        """
        _check_group(unit, group)
        codec, policy, message = unit.group.look_up(
            "all_gather", output.dtype, output.nbytes, role="parameter"
        )
        if codec == NONE:
            with unit.group.role("parameter"):
                work: dist.Work | None = all_gather_single(
                    output, shard, group=group, async_op=async_op or output.device.type == "cpu"
                )
                return work
        seed = derive_seed(unit.group.options.seed, _GATHER, int(self._steps), unit.index)
        outs, options = equal_parts(output, group.size()), unit.group.call_options(policy, message, seed=seed)

        def call(transport: Metered) -> None:
            c.all_gather(shard, outs, codec, transport, options)

        return unit.group.submit(message, call, output, lane=_GATHER_LANE)

    def reduce(self, unit: Unit, output: Tensor, gradients: Tensor, group: Any, op: Any) -> None:
        """Fill output, this rank's part of a message of gradients, with their sum or mean over the ranks."""
        _check_group(unit, group)
        self._step_scale = self._scale() if self._scale is not None else 1.0
        self._reductions += 1
        self._reduce_scatter(unit, output, gradients, op)
        if unit.replicas is not None:
            # FSDP all-reduces it next, unless it was told to wait for more.
            unit.replicas.reduce_by(output, lambda op: self._all_reduce(unit, output, op))

    def _reduce_scatter(self, unit: Unit, output: Tensor, gradients: Tensor, op: Any) -> None:
        compressor, policy, message = unit.group.look_up_gradient(
            "reduce_scatter", gradients.dtype, gradients.nbytes
        )
        if not isinstance(compressor, Codec) or compressor == NONE:
            with unit.group.role("gradient"):
                reduce_scatter_single(output, gradients, op=op, group=unit.group)
            return
        mean, scale = _is_mean(unit, op), self._step_scale
        seed = derive_seed(unit.group.options.seed, _REDUCE, int(self._steps), self._reductions)
        options = unit.group.call_options(policy, message, mean=mean, seed=seed)
        members: tuple[Member, ...] = ()
        if _has_residual(compressor, policy):
            members = _members(unit, gradients.numel(), unit.group.size())
        axis, device = message.axis, unit.device
        kept = [self._residuals.use(m.name, m.numel, axis=axis, device=device) for m in members]

        def call(transport: Metered) -> None:
            if not members:
                reductions.coded_reduce_scatter(gradients, output, compressor, None, transport, options)
                return
            # Residuals are unscaled.
            flat = gradients.float() / scale if scale != 1.0 else gradients
            residual = torch.zeros(flat.numel(), device=flat.device)
            for own, part in zip(kept, columns(residual, members, transport.size), strict=True):
                put(part, own)
            reductions.coded_reduce_scatter(flat, output, compressor, residual, transport, options)
            for own, part in zip(kept, columns(residual, members, transport.size), strict=True):
                take(part, own)
            if scale != 1.0:
                output.mul_(scale)

        # FSDP ignores the Work.
        work = unit.group.submit(message, call, output, lane=_REDUCE_LANE)
        if mean and unit.takes_views(output.dtype) and self._deferred.possible():
            self._deferred.add(work)
        else:
            work.wait()

    def _all_reduce(self, unit: Unit, output: Tensor, op: Any) -> dist.Work:
        """Sum or average what was reduce-scattered over the replicas."""
        group = unit.replicas
        assert group is not None
        compressor, policy, message = group.look_up_gradient("all_reduce", output.dtype, output.nbytes)
        if not isinstance(compressor, Codec) or compressor == NONE:
            with group.role("gradient"):
                return group.allreduce([output], op)
        seed = derive_seed(group.options.seed, _REPLICATE, int(self._steps), self._reductions)
        options = group.call_options(policy, message, mean=_is_mean(unit, op), seed=seed)
        if not _has_residual(compressor, policy):
            return group.submit(
                message, lambda transport: c.all_reduce(output, compressor, transport, options), [output]
            )
        scale, members = self._step_scale, _members(unit, output.numel(), 1)
        *kept, owner = (
            self._residuals.use(name, numel, axis=message.axis, device=unit.device)
            for name, numel in _replica_residuals(group, members, compressor)
        )

        def call(transport: Metered) -> None:
            flat = output.float() / scale if scale != 1.0 else output
            residuals = c.Residuals(torch.cat(kept).float(), owner.float())
            c.all_reduce(flat, compressor, transport, options, residuals=residuals)
            parts = torch.split(residuals.sender, [member.share for member in members])
            for own, part in zip(kept, parts, strict=True):
                own.copy_(part)
            owner.copy_(residuals.owner)
            if flat is not output:
                output.copy_(flat.mul_(scale))

        return group.submit(message, call, [output])

    def _take_over(self, unit: Unit) -> None:
        members = unit.trained()
        numel, group = sum(member.share for member in members), unit.replicas
        nbytes = numel * unit.dtype.itemsize
        compressor, policy, message = unit.group.look_up_gradient(
            "reduce_scatter", unit.dtype, unit.group.size() * nbytes
        )
        if _has_residual(compressor, policy):
            for member in members:
                self._residuals.make(member.name, member.numel, axis=message.axis, device=unit.device)
        if group is not None and members:
            compressor, policy, message = group.look_up_gradient("all_reduce", unit.dtype, nbytes)
            if isinstance(compressor, Codec) and _has_residual(compressor, policy):
                for name, length in _replica_residuals(group, members, compressor):
                    self._residuals.make(name, length, axis=message.axis, device=unit.device)
        module: Any = unit.module
        module.set_custom_all_gather(_AllGather(self, unit))
        module.set_custom_reduce_scatter(_ReduceScatter(self, unit))

    def _end_step(self) -> None:
        """Before parameters are gathered for the next one. A loss scale that has fallen says that it was skipped."""
        if self._reductions == 0:
            return
        if self._scale is not None and self._scale() < self._step_scale:
            self._residuals.undo()
        self._reductions = 0
        self._residuals.end_step()
        self._steps += 1


class Allocates:
    """How FSDP gets the buffer of a message from a collective of somebody else's: as from its own."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _OfUnit(Allocates):
    def __init__(self, compression: FsdpCompression, unit: Unit) -> None:
        self._compression = compression
        self._unit = unit


class _AllGather(_OfUnit):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        return self._compression.gather(self._unit, output_tensor, input_tensor, group, async_op)


class _ReduceScatter(_OfUnit):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work:
        self._compression.reduce(self._unit, output_tensor, input_tensor, group, op)
        return c.done(output_tensor)


def _has_residual(compressor: Compressor, policy: AxisPolicy) -> bool:
    return policy.feedback and not compressor.lossless


def _is_mean(unit: Unit, op: Any) -> bool:
    """Whether a reduction is a mean or a sum; UnsupportedError if it is neither."""
    mean, total = (bool(op == linear) for linear in (dist.ReduceOp.AVG, dist.ReduceOp.SUM))
    if not (mean or total):
        raise UnsupportedError(
            f"FSDP unit {unit.name}: gradients are summed or averaged, not reduced by {op}; with "
            "set_gradient_divide_factor, call set_force_sum_reduction_for_comms(True), too"
        )
    return mean


def _members(unit: Unit, numel: int, ranks: int) -> tuple[Member, ...]:
    """The parameters in a message with their gradients' parts of that many ranks."""
    members = unit.trained()
    expected = ranks * sum(member.share for member in members)
    if numel != expected:
        raise UnsupportedError(
            f"FSDP unit {unit.name}: {expected} values of gradients expected, {numel} found: a parameter "
            "got no gradient, and error feedback has to know which; freeze it with requires_grad_(False), or call "
            "set_reduce_scatter_unused_params(True)"
        )
    return members


def _replica_residuals(
    group: ThinwireGroup, members: Sequence[Member], codec: Codec
) -> Iterator[tuple[str, int]]:
    """Names and sizes of the residuals between replicas: each parameter's, and that of the owner of a chunk."""
    for member in members:
        yield f"{member.name}.replica", member.share
    owned = 0
    if group.size() > 2:  # two ranks encode once
        numel = sum(member.share for member in members)
        start, stop = c.Chunks.of(numel, group.size(), codec.granule).bounds(group.rank())
        owned = stop - start
    yield f"{members[0].name}.replica.owner", owned


def _check_group(unit: Unit, group: Any) -> None:
    if group is not unit.group:
        raise UnsupportedError(
            f"FSDP unit {unit.name} uses another group than the one that compress_fsdp has seen; give fully_shard "
            "reshard_after_forward=True or False instead of a number, and leave out set_separate_reduce_scatter_group"
        )


def _check_policy(unit: Unit) -> None:
    """Raise UnsupportedError for what FSDP2's messages do not allow, whatever their dtype."""
    policy = unit.group.policy
    reduced = [(unit.group, "reduce_scatter")]
    if unit.replicas is not None:
        reduced.append((unit.replicas, "all_reduce"))
    for group, op in reduced:
        axis = group.axis(op)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            compressor = group.policy.axis(axis).codec(op, "gradient", dtype, sys.maxsize)
            if not isinstance(compressor, Codec):
                raise UnsupportedError(
                    f"policy {group.policy.name}, axis {axis}: {compressor} needs whole matrices, and FSDP2 sends them cut "
                    "into rows; use a codec, or thinwire.GradientSync"
                )
    axis = unit.group.axis("all_gather")
    if policy.axis(axis).difference:
        raise UnsupportedError(
            f"policy {policy.name}, axis {axis}: differences need the parameters that were sent last, which FSDP2 frees; "
            "use a policy with difference = false and 8 bits or more for all_gather, or thinwire.GradientSync"
        )


def compress_fsdp(
    model: nn.Module,
    *,
    scale: Callable[[], float] | None = None,
    rollback: bool = False,
    residual_dtype: torch.dtype = torch.float32,
) -> FsdpCompression:
    """Let FSDP2 gather parameters and reduce gradients through the policy of its group, with error feedback.

    model: ``fully_shard`` was called on it, over a thinwire group whose options say ``feedback_by_caller``; the module whose
    forward pass begins a step. scale: the factor that losses are multiplied by at the moment (``scaler.get_scale`` of a
    GradScaler), if there is one: residuals are held without it, and when it has fallen after a step, that step was
    skipped, and residuals go back. rollback: keep copies of residuals, so that ``skip()`` can do so; with ``scale``, always.
    residual_dtype: float32, or bfloat16 for half of the memory: values are compensated in fp32 and what was lost is rounded
    to nearest even. A policy with ``feedback = false`` keeps no residuals.

    Returns the state, which belongs into checkpoints. Raises UnsupportedError for a model without sharded parameters, for
    another group or one that is not told so, and for a policy with ``difference`` or a codec that needs whole matrices.
    """
    if residual_dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(f"residual_dtype={residual_dtype}: must be torch.float32 or torch.bfloat16")
    units = units_of(model)
    for unit in units:
        _check_policy(unit)
    return FsdpCompression(model, units, scale=scale, rollback=rollback, residual_dtype=residual_dtype)
