"""DistributedDataParallel with error feedback: a communication hook that knows the parameters of a bucket.

Without it DDP runs over a thinwire group as it is, with any policy that asks for no feedback. ::

    dist.init_process_group("thinwire", pg_options=GroupOptions(policy="balanced", feedback_by_caller=True))
    model = DistributedDataParallel(model)
    compression = thinwire.compress_ddp(model)

DDP groups parameters into buckets anew after the first step: residuals are kept by parameter and move with them. A
parameter that no rank has used in a step (``find_unused_parameters``) does not get what was reduced of it: its residuals
are taken back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakMethod, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .. import collectives as c
from ..codecs import Compressor, LowRank
from ..collectives.transport import Metered
from ..errors import CheckpointError, UnsupportedError
from ..feedback import Feedback, Span, StepState
from ..group import ThinwireGroup
from ..policy import NONE, AxisPolicy
from ..warm_start import check_saved_q
from . import reductions
from .reductions import States


class DdpCompression:
    """The state of the hook: residuals, and the Q that low-rank reductions start from, by parameter name.

    scale: the factor that losses are multiplied by at the moment (``scaler.get_scale`` of a GradScaler), if there is one:
    residuals are held without it, and a step whose gradients overflow takes residuals and Q back, as the scaler skips it.
    """

    def __init__(
        self, model: DistributedDataParallel, group: ThinwireGroup, scale: Callable[[], float] | None
    ) -> None:
        self.group = group
        self._model = ref(model)  # it holds this
        self._names = {parameter: name for name, parameter in model.module.named_parameters()}
        self._scale = scale
        # A static graph's unused parameters are never used, so they have no residual to lose.
        self._finds_unused = model.find_unused_parameters and not model.static_graph
        self._ended = True  # the step before
        self._last = sys.maxsize  # index of the bucket before
        self._buckets: dict[int, tuple[tuple[str, ...], States]] = {}
        self._live: dict[str, Tensor] = {}  # name -> its part of a bucket's residual
        self._qs: dict[str, Tensor] = {}  # by their names in checkpoints
        self._loaded: dict[str, Tensor] = {}
        self._overflow = False

    @property
    def nbytes(self) -> int:
        """Memory of residuals and Q in bytes, copies for skipped steps included."""
        return sum(state.nbytes for state in self._states())

    def state_dict(self) -> dict[str, Tensor]:
        """Views of the live residuals ``NAME@AXIS``, of Q ``NAME@AXIS.q``, and ``NAME@AXIS.owner`` (first in its bucket)."""
        tensors: dict[str, Tensor] = {}
        for state in self._states():
            tensors |= state.state_dict()
        return tensors

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take tensors back, into buckets as they come. An owner's residual is used where its chunk is the same, else 0.

        Raises CheckpointError for a residual of another size, or a Q that is missing or of another shape.
        """
        axis = self._axis
        for parameter, name in self._names.items():
            residual = state.get(f"{name}@{axis}")
            if residual is not None and residual.numel() != parameter.numel():
                raise CheckpointError(
                    f"residual {name}@{axis}: {parameter.numel()} values expected, {residual.numel()} found"
                )
            compressor = self.group.policy.axis(axis).codec(
                "all_reduce", "gradient", parameter.dtype, sys.maxsize
            )
            if isinstance(compressor, LowRank):
                check_saved_q(name, axis, parameter.shape, compressor, state)
        self._loaded = {key: tensor.clone() for key, tensor in state.items()}
        self._qs = {key: tensor for key, tensor in self._loaded.items() if key.endswith(".q")}
        self._buckets.clear()
        self._live.clear()

    def _states(self) -> list[StepState]:
        return [state for _, pair in self._buckets.values() for state in pair if state is not None]

    @property
    def _axis(self) -> str:
        return self.group.axis("all_reduce")

    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Average a bucket (a ``dist.GradBucket``) over the group.

        DDP calls it during the backward pass, in the same order on every rank.
        """
        self._check_join()
        if bucket.index() <= self._last:  # not 0: DDP may be told to skip buckets without gradients
            self._begin_step()
        self._last = bucket.index()
        buffer = bucket.buffer()
        nbytes = buffer.numel() * buffer.element_size()
        compressor, policy, message = self.group.look_up_gradient("all_reduce", buffer.dtype, nbytes)
        if self.group.size() == 1:
            return c.done(buffer).get_future()
        if compressor == NONE or buffer.is_sparse:
            # As DDP does without a hook.
            work = dist.all_reduce(buffer.div_(self.group.size()), group=self.group, async_op=True)
            # Weakly: the inner group's thread drops the callback, and must not be the last to hold the group.
            seen = WeakMethod(self._seen)

            def note(future: Future[list[Tensor]]) -> Tensor:
                averaged, live = future.value()[0], seen()
                return averaged if live is None else live(averaged)

            passed: Future[Tensor] = work.get_future().then(note)
            return passed
        kept = self._kept(bucket, compressor, policy)
        options = self.group.call_options(policy, mean=True)
        scale = self._scale() if self._scale is not None else 1.0
        widen = scale != 1.0 or isinstance(compressor, LowRank)

        def call(transport: Metered) -> None:
            flat = buffer.float() / scale if widen else buffer
            reductions.all_reduce(flat, compressor, kept, transport, options)
            if flat is not buffer:
                buffer.copy_(flat.mul_(scale))
            self._seen(buffer)

        future: Future[Tensor] = self.group.submit(message, call, buffer).get_future()
        return future

    def _seen(self, buffer: Tensor) -> Tensor:
        """Note whether an averaged bucket says that the step will be skipped."""
        values = buffer.coalesce().values() if buffer.is_sparse else buffer
        if self._scale is not None and not bool(torch.isfinite(values).all()):
            self._overflow = True
        return buffer

    def _begin_step(self) -> None:
        """Every rank has the same gradients, so all of them find the same overflow."""
        self._end_step()
        for state in self._states():
            if self._overflow:
                state.rollback()
            state.begin()
        self._overflow = self._ended = False

    def _end_step(self) -> None:
        """What was reduced of parameters that no rank has used in the step before is not in their gradients.

        DDP can be asked which those are before the next forward pass, not during a backward pass; a rank that has no inputs
        left (``join``) makes neither.
        """
        model: Any = self._model()
        if self._ended or not self._finds_unused or model is None:
            return
        self._ended = True
        if self._overflow:
            return
        used = model.reducer._get_local_used_map().tolist()  # summed over the ranks
        trained = [parameter for parameter in model._module_parameters if parameter.requires_grad]
        unused = {self._names[p] for p, count in zip(trained, used, strict=True) if count == 0}
        for state in self._states():
            state.forget(unused)

    def _check_join(self) -> None:
        model: Any = self._model()
        if model is None or not model._join_config.enable or model._divide_by_initial_world_size:
            return
        raise UnsupportedError(
            "join(divide_by_initial_world_size=False): DDP does not tell a communication hook how many ranks have inputs "
            "left, so the average would be wrong; use join() without it, or a policy with feedback = false and no "
            "compress_ddp"
        )

    def _kept(self, bucket: Any, compressor: Compressor, policy: AxisPolicy) -> States:
        """What the bucket keeps, with what its parameters had wherever they were before."""
        parameters = bucket.parameters()
        names = tuple(self._names[p] for p in parameters)
        known = self._buckets.get(bucket.index())
        if known is not None and known[0] == names:
            return known[1]
        # Buckets have been made anew; those from here on hold other parameters, or are no more.
        self._buckets = {index: kept for index, kept in self._buckets.items() if index < bucket.index()}
        spans, begin = [], 0
        for name, parameter in zip(names, parameters, strict=True):
            spans.append(Span(name, begin, begin + parameter.numel(), tuple(parameter.shape)))
            begin += parameter.numel()
        axis, size = self._axis, self.group.size()
        kept = reductions.make_states(
            spans,
            begin,
            self.group,
            compressor,
            policy,
            axis=axis,
            owns_chunk=size > 2,
            rollback=self._scale is not None or self._finds_unused,
            device=bucket.buffer().device,
            known=self._qs,
        )
        feedback, warm_start = kept
        if warm_start is not None:
            self._qs |= warm_start.state_dict()
        if feedback is not None:
            self._take_over(feedback, spans)
        for state in kept:
            if state is not None:
                state.begin()
        self._buckets[bucket.index()] = names, kept
        return kept

    def _take_over(self, feedback: Feedback, spans: list[Span]) -> None:
        """Fill new residuals with those that their parameters had."""
        axis = self._axis
        for span in spans:
            target = feedback.sender[span.begin : span.end]
            before = self._live.get(span.name, self._loaded.pop(f"{span.name}@{axis}", None))
            if before is not None:
                target.copy_(before.reshape(-1))
            self._live[span.name] = target
        saved = self._loaded.pop(f"{spans[0].name}@{axis}.owner", None)
        if saved is not None and saved.numel() == feedback.owner.numel():
            feedback.owner.copy_(saved)


def compress_ddp(
    model: DistributedDataParallel, *, scale: Callable[[], float] | None = None
) -> DdpCompression:
    """Let ``model`` average its gradients through the policy of its group, with error feedback if that asks for it.

    model: over a thinwire group whose options say ``feedback_by_caller``. scale: see :class:`DdpCompression`. Returns
    the state, which belongs into checkpoints. Raises UnsupportedError for another group, or one that is not told so.
    """
    group = reductions.feedback_group(
        model.process_group,
        "compress_ddp",
        "a thinwire group, this model's",
        "give DistributedDataParallel process_group=...",
    )
    compression = DdpCompression(model, group, scale)
    if compression._finds_unused:
        end_step = WeakMethod(compression._end_step)

        def before_forward(module: nn.Module, inputs: Any) -> None:
            end = end_step()
            if end is not None:
                end()

        model.register_forward_pre_hook(cast(Any, torch.compiler.disable)(before_forward))
    model.register_comm_hook(compression, _hook)
    return compression


def _hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with the types themselves
    return state.reduce(bucket)
