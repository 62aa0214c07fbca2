"""DistributedDataParallel with error feedback: a communication hook that knows the parameters of a bucket.

Without it DDP runs over a thinwire group as it is, with any policy that asks for no feedback. ::

    dist.init_process_group("thinwire", pg_options=GroupOptions(policy="balanced", feedback_by_caller=True))
    model = DistributedDataParallel(model)
    compression = thinwire.compress_ddp(model)

Where DDP was made over a plain group, only gradients change the road: parameters, buffers and the script's own messages
stay exact. ::

    compression = thinwire.compress_ddp(model, group=thinwire.integrate.ddp.gradient_group(model, "balanced"))

DDP groups parameters into buckets anew after the first step: residuals are kept by parameter and move with them, and
checkpoints say which buckets come next (:mod:`.ddp_buckets`). A parameter that no rank has used in a step
(``find_unused_parameters``) does not get what was reduced of it: its residuals are taken back.
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
from ..collectives.options import derive_seed
from ..collectives.transport import Metered
from ..errors import CheckpointError, UnsupportedError
from ..feedback import Feedback, Span, StepState
from ..group import GroupOptions, ThinwireGroup
from ..policy import NONE, AxisPolicy, Policy
from ..warm_start import check_saved_q
from . import ddp_buckets, reductions
from .reductions import States

# A part of seeds; groups count their own calls under 0 and 1, FSDP has 2 and 3.
_REDUCE = 4


class DdpCompression:
    """The state of the hook: residuals, and the Q that low-rank reductions start from, by parameter name; number of steps.

    scale: the factor that losses are multiplied by at the moment (``scaler.get_scale`` of a GradScaler), if there is one:
    residuals are held without it, and a step whose gradients overflow takes residuals and Q back, as the scaler skips it.
    """

    def __init__(
        self, model: DistributedDataParallel, group: ThinwireGroup, scale: Callable[[], float] | None
    ) -> None:
        self.group = group
        self._model = ref(model)  # its reducer holds this hook
        self._names = {parameter: name for name, parameter in model.module.named_parameters()}
        self._scale = scale
        # A static graph's unused parameters are never used, so they have no residual to lose.
        self._finds_unused = model.find_unused_parameters and not model.static_graph
        self._ended = True  # the step before
        self._last = sys.maxsize  # index of the bucket before
        self._sent = 0  # compressed buckets of this step
        self._buckets: dict[int, tuple[tuple[str, ...], States]] = {}
        self._layout: dict[int, list[Tensor]] = {}  # the parameters of all buckets, compressed or not
        self._live: dict[str, Tensor] = {}  # name -> its part of a bucket's residual
        self._qs: dict[str, Tensor] = {}  # by their names in checkpoints
        self._loaded: dict[str, Tensor] = {}
        self._steps = torch.zeros(1, dtype=torch.int64)
        self._overflow = False

    @property
    def nbytes(self) -> int:
        """Memory of residuals and Q in bytes, copies for skipped steps included."""
        return sum(state.nbytes for state in self._states())

    def state_dict(self) -> dict[str, Tensor]:
        """Residuals ``NAME@AXIS``, ``NAME@AXIS.owner`` (first in its bucket), Q ``NAME@AXIS.q``, ``steps``, ``buckets``.

        They are this rank's; all but the last share memory with the live ones. All ranks call it, between steps: after the
        first one they make the buckets anew, which DDP would do in the next.
        """
        self._end_step()
        model = self._model()
        anew = ddp_buckets.rebuilt(model) if model is not None else None
        if anew is not None:
            self._layout = dict(enumerate(anew))
        tensors = {"steps": self._steps, "buckets": self._layout_tensor()}
        # Of buckets that have not come since they were loaded.
        tensors |= {key: tensor for key, tensor in self._loaded.items() if "@" in key}
        for index, (names, states) in self._buckets.items():
            same = names == tuple(self._names[p] for p in self._layout.get(index, ()))
            for state in states:
                if state is not None:
                    found = state.state_dict()
                    tensors |= found if same else {k: t for k, t in found.items() if not k.endswith(".owner")}
        return tensors

    def buckets(self) -> list[list[tuple[str, int]]]:
        """Names and numels of the parameters of each bucket that has come, in their order."""
        feedbacks = [feedback for _, (feedback, _) in self._buckets.values() if feedback is not None]
        return [[(s.name, s.end - s.begin) for s in feedback.spans] for feedback in feedbacks]

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take tensors back: the steps that follow are, bit for bit, those that would have followed.

        For a state without ``buckets`` DDP begins with its own ones; an owner's residual is then used where its chunk is the
        same, else 0. Raises CheckpointError, before anything is changed, for a residual of another size, a Q that is
        missing or of another shape, or buckets of another model.
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
        layout = self._layout_of(state["buckets"]) if "buckets" in state else {}
        self._loaded = {key: tensor.clone() for key, tensor in state.items()}
        self._qs = {key: tensor for key, tensor in self._loaded.items() if key.endswith(".q")}
        if "steps" in state:
            self._steps.copy_(state["steps"])
        self._buckets.clear()
        self._live.clear()
        self._layout, self._last = layout, sys.maxsize
        self._overflow, self._ended = False, True
        model = self._model()
        if layout and model is not None:
            ddp_buckets.begin_with(model, list(layout.values()))

    def _layout_tensor(self) -> Tensor:
        """One row for each trained parameter, in the order of buckets: its bucket, and its number in the model."""
        numbers = {parameter: number for number, parameter in enumerate(self._names)}
        rows = [(index, numbers[p]) for index, bucket in sorted(self._layout.items()) for p in bucket]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 2)

    def _layout_of(self, rows: Tensor) -> dict[int, list[Tensor]]:
        model, parameters = self._model(), list(self._names)
        reduced = {id(p) for p in (ddp_buckets.reduced(model) if model is not None else [])}
        expected = [number for number, p in enumerate(parameters) if id(p) in reduced]
        if rows.numel() and sorted(rows[:, 1].tolist()) != expected:
            raise CheckpointError(
                f"buckets: those of {len(rows)} trained parameters found, this model has {len(expected)}, or others; resume "
                "with the model that the checkpoint was written with"
            )
        layout: dict[int, list[Tensor]] = {}
        for index, number in rows.tolist():
            layout.setdefault(index, []).append(parameters[number])
        return layout

    def _states(self) -> list[StepState]:
        return [state for _, pair in self._buckets.values() for state in pair if state is not None]

    @property
    def _axis(self) -> str:
        return self.group.axis("all_reduce")

    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Average a bucket (a ``dist.GradBucket``) over the group.

        DDP calls it during the backward pass, in the same order on every rank.
        """
        index = self._number(bucket)
        self._check_join()
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
        kept = self._kept(index, bucket, compressor, policy)
        seed = derive_seed(self.group.options.seed, _REDUCE, int(self._steps), index)
        options = self.group.call_options(policy, message, mean=True, seed=seed)
        scale = self._scale() if self._scale is not None else 1.0
        widen = scale != 1.0 or isinstance(compressor, LowRank)

        def call(transport: Metered) -> None:
            flat = buffer.float() / scale if widen else buffer
            reductions.all_reduce(flat, compressor, kept, transport, options)
            if flat is not buffer:
                buffer.copy_(flat.mul_(scale))
            self._seen(buffer)

        lane, self._sent = self._sent, self._sent + 1
        future: Future[Tensor] = self.group.submit(message, call, buffer, lane=lane).get_future()
        return future

    def _seen(self, buffer: Tensor) -> Tensor:
        """Note whether an averaged bucket says that the step will be skipped."""
        values = buffer.coalesce().values() if buffer.is_sparse else buffer
        if self._scale is not None and not bool(torch.isfinite(values).all()):
            self._overflow = True
        return buffer

    def _number(self, bucket: Any) -> int:
        """The number of a bucket in its step; the first one begins it. DDP may be told to leave out those without gradients.

        DDP gives them their index, but for the first step of a static graph, where it says 0 of all of them.
        """
        parameters, index = bucket.parameters(), bucket.index()
        begun = any(p is parameters[0] for known in self._layout.values() for p in known)
        if index < self._last or begun or not self._layout:
            self._begin_step()
        elif index == self._last:
            index = len(self._layout)
        self._last = bucket.index()
        self._layout[index] = parameters
        return int(index)

    def _begin_step(self) -> None:
        self._end_step()
        self._steps += 1
        self._sent = 0
        self._layout.clear()
        for state in self._states():
            state.begin()
        self._overflow = self._ended = False

    def _end_step(self) -> None:
        """Residuals go back where gradients did not take what was reduced: all after an overflow, which every rank finds
        alike, else those of parameters that no rank has used in the step.

        DDP can be asked which those are before the next forward pass, not during a backward pass; a rank that has no inputs
        left (``join``) makes neither.
        """
        if self._ended:
            return
        self._ended = True
        model: Any = self._model()
        if self._overflow:
            for state in self._states():
                state.rollback()
        elif self._finds_unused and model is not None:
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

    def _kept(self, index: int, bucket: Any, compressor: Compressor, policy: AxisPolicy) -> States:
        """What the bucket keeps, with what its parameters had wherever they were before."""
        parameters = bucket.parameters()
        names = tuple(self._names[p] for p in parameters)
        known = self._buckets.get(index)
        if known is not None and known[0] == names:
            return known[1]
        # Buckets have been made anew; those from here on hold other parameters, or are no more.
        self._buckets = {before: kept for before, kept in self._buckets.items() if before < index}
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
        self._buckets[index] = names, kept
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
        owners = [self._loaded.pop(f"{span.name}@{axis}.owner", None) for span in spans]
        saved = owners[0]
        if saved is not None and saved.numel() == feedback.owner.numel():
            feedback.owner.copy_(saved)


def compress_ddp(
    model: DistributedDataParallel,
    *,
    group: dist.ProcessGroup | None = None,
    scale: Callable[[], float] | None = None,
) -> DdpCompression:
    """Let ``model`` average its gradients through the policy of a group, with error feedback if that asks for it.

    group: a thinwire group whose options say ``feedback_by_caller``, of the ranks of the model's group (None: that one).
    scale: see :class:`DdpCompression`. Returns the state, which belongs into checkpoints. Raises UnsupportedError for
    another group, or one that is not told so.
    """
    ours = reductions.feedback_group(
        model.process_group if group is None else group,
        "compress_ddp",
        "a thinwire group, this model's" if group is None else "a thinwire group, the given one",
        "give it group=gradient_group(model, policy), or DistributedDataParallel process_group=...",
    )
    ranks, expected = (dist.get_process_group_ranks(g) for g in (ours, model.process_group))
    if ranks != expected:
        raise UnsupportedError(f"compress_ddp: the group is of ranks {ranks}, the model's of {expected}")
    compression = DdpCompression(model, ours, scale)
    if compression._finds_unused:
        end_step = WeakMethod(compression._end_step)

        def before_forward(module: nn.Module, inputs: Any) -> None:
            end = end_step()
            if end is not None:
                end()

        model.register_forward_pre_hook(cast(Any, torch.compiler.disable)(before_forward))
    model.register_comm_hook(compression, _hook)
    return compression


def gradient_group(
    model: DistributedDataParallel, policy: Policy | str, *, seed: int = 0
) -> dist.ProcessGroup:
    """A group of axis ``dp`` for the gradients of a model over a plain group: of its ranks, over gloo or (CUDA) nccl.

    All ranks of the model's group call it. seed: of stochastic rounding. Raises PolicyError or SpecError for a policy that
    cannot be.
    """
    cuda = any(parameter.is_cuda for parameter in model.module.parameters())
    options = GroupOptions(
        policy=policy, axis="dp", feedback_by_caller=True, backend="nccl" if cuda else "gloo", seed=seed
    )
    ranks = dist.get_process_group_ranks(model.process_group)
    part = len(ranks) < dist.get_world_size()
    group: dist.ProcessGroup = dist.new_group(
        ranks, backend="thinwire", pg_options=options, use_local_synchronization=part
    )
    return group


def _hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with the types themselves
    return state.reduce(bucket)
