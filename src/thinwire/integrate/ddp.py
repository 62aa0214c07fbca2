"""DistributedDataParallel with error feedback: a communication hook that knows the parameters of a bucket.

Without it DDP runs over a thinwire group as it is, with any policy that asks for no feedback. ::

    dist.init_process_group("thinwire", pg_options=GroupOptions(policy="balanced", feedback_by_caller=True))
    model = DistributedDataParallel(model)
    compression = thinwire.compress_ddp(model)

DDP groups parameters into buckets anew after the first step: residuals are kept by parameter and move with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .. import collectives as c
from ..codecs import Codec
from ..collectives.transport import Metered
from ..errors import CheckpointError, UnsupportedError
from ..feedback import Feedback, Span
from ..group import ThinwireGroup
from ..policy import NONE, AxisPolicy


class DdpCompression:
    """The state of the hook: residuals by parameter name.

    scale: the factor that losses are multiplied by at the moment (``scaler.get_scale`` of a GradScaler), if there is one:
    residuals are held without it, and a step whose gradients overflow takes its residuals back, as the scaler skips it.
    """

    def __init__(
        self, names: dict[Tensor, str], group: ThinwireGroup, scale: Callable[[], float] | None
    ) -> None:
        self.group = group
        self._names = names
        self._scale = scale
        self._buckets: dict[int, tuple[tuple[str, ...], Feedback]] = {}
        self._live: dict[str, Tensor] = {}  # name -> its part of a bucket's residual
        self._loaded: dict[str, Tensor] = {}
        self._overflow = False

    @property
    def nbytes(self) -> int:
        """Memory of the residuals in bytes, copies for skipped steps included."""
        return sum(feedback.nbytes for _, feedback in self._buckets.values())

    def state_dict(self) -> dict[str, Tensor]:
        """Views of the live residuals: ``NAME@AXIS``, and ``NAME@AXIS.owner`` by a bucket's first parameter."""
        state: dict[str, Tensor] = {}
        for _, feedback in self._buckets.values():
            state |= feedback.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take residuals back, into buckets as they come. An owner's residual is used where its chunk is the same, else 0.

        Raises CheckpointError for a parameter of another size.
        """
        sizes = {f"{name}@{self._axis}": parameter.numel() for parameter, name in self._names.items()}
        for key, residual in state.items():
            if key in sizes and residual.numel() != sizes[key]:
                raise CheckpointError(
                    f"residual {key}: {sizes[key]} values expected, {residual.numel()} found"
                )
        self._loaded = {key: residual.clone() for key, residual in state.items()}
        self._buckets.clear()
        self._live.clear()

    @property
    def _axis(self) -> str:
        return self.group.axis("all_reduce")

    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Average a bucket (a ``dist.GradBucket``) over the group.

        DDP calls it during the backward pass, in the same order on every rank.
        """
        if bucket.index() == 0:
            self._begin_step()
        buffer = bucket.buffer()
        nbytes = buffer.numel() * buffer.element_size()
        codec, policy, message = self.group.look_up("all_reduce", buffer.dtype, nbytes, role="gradient")
        if codec == NONE:
            # As DDP does without a hook.
            work = dist.all_reduce(buffer.div_(self.group.size()), group=self.group, async_op=True)
            passed: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
            return passed
        feedback = self._feedback(bucket, codec, policy)
        residuals = None if feedback is None else c.Residuals(feedback.sender, feedback.owner)
        options = self.group.call_options(policy, mean=True)
        scale = self._scale() if self._scale is not None else 1.0

        def call(transport: Metered) -> None:
            flat = buffer if scale == 1.0 else buffer.float() / scale
            c.all_reduce(flat, codec, transport, options, residuals=residuals)
            if flat is not buffer:
                buffer.copy_(flat.mul_(scale))
            if self._scale is not None and not bool(torch.isfinite(buffer).all()):
                self._overflow = True

        future: Future[Tensor] = self.group.submit(message, call, buffer).get_future()
        return future

    def _begin_step(self) -> None:
        """Every rank has the same gradients, so all of them find the same overflow."""
        for _, feedback in self._buckets.values():
            if self._overflow:
                feedback.rollback()
            feedback.begin()
        self._overflow = False

    def _feedback(self, bucket: Any, codec: Codec, policy: AxisPolicy) -> Feedback | None:
        """The bucket's residuals, with those of its parameters wherever they were before."""
        if not policy.feedback or codec.lossless or self.group.size() == 1:
            return None
        parameters = bucket.parameters()
        names = tuple(self._names[p] for p in parameters)
        known = self._buckets.get(bucket.index())
        if known is not None and known[0] == names:
            return known[1]
        spans, begin = [], 0
        for name, parameter in zip(names, parameters, strict=True):
            spans.append(Span(name, begin, begin + parameter.numel()))
            begin += parameter.numel()
        owner = 0
        if self.group.size() > 2:
            start, stop = c.Chunks.of(begin, self.group.size(), codec.granule).bounds(self.group.rank())
            owner = stop - start
        axis = self._axis
        feedback = Feedback(spans, begin, axis=axis, owner_numel=owner, rollback=self._scale is not None)
        for span in spans:
            target = feedback.sender[span.begin : span.end]
            before = self._live.get(span.name, self._loaded.pop(f"{span.name}@{axis}", None))
            if before is not None:
                target.copy_(before.reshape(-1))
            self._live[span.name] = target
        saved = self._loaded.pop(f"{names[0]}@{axis}.owner", None)
        if saved is not None and saved.numel() == owner:
            feedback.owner.copy_(saved)
        feedback.begin()
        self._buckets[bucket.index()] = names, feedback
        return feedback


def compress_ddp(
    model: DistributedDataParallel, *, scale: Callable[[], float] | None = None
) -> DdpCompression:
    """Let ``model`` average its gradients through the policy of its group, with error feedback if that asks for it.

    model: over a thinwire group whose options say ``feedback_by_caller``. scale: see :class:`DdpCompression`. Returns
    the state, which belongs into checkpoints. Raises UnsupportedError for another group, or one that is not told so.
    """
    group: Any = model.process_group
    if not isinstance(group, ThinwireGroup):
        raise UnsupportedError(
            f"compress_ddp needs a thinwire group, this model's is {type(group).__name__}; give DistributedDataParallel "
            'process_group=..., or init_process_group("thinwire", pg_options=...)'
        )
    if not group.options.feedback_by_caller:
        raise UnsupportedError(
            "compress_ddp runs error feedback: make the group with feedback_by_caller=True"
        )
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    compression = DdpCompression(names, group, scale)
    model.register_comm_hook(compression, _hook)
    return compression


def _hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with the types themselves
    return state.reduce(bucket)
