"""Gradients of a data-parallel group: buckets that travel during the backward pass, and the way back.

With ``sharded`` (ZeRO-1) a bucket is reduce-scattered; each rank updates its shard of an fp32 master copy, and the
updated parameters are gathered. Without, it is all-reduced and every rank updates all of it.

Over a :class:`~thinwire.group.ThinwireGroup` the messages go through the policy's codecs, with error feedback where
the policy asks for it; over any other group they travel as they are.

Micro-batches add up in fp32 in the flat buffer of the bucket, whatever the parameter's dtype: a parameter's
``grad`` is taken and set to None as soon as autograd has filled it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .. import collectives as c
from ..codecs import Compressor
from ..collectives.frames import equal_parts
from ..collectives.options import CallOptions
from ..collectives.transport import Metered
from ..errors import CheckpointError, UnsupportedError
from ..feedback import Feedback, Span, StepState
from ..group import ThinwireGroup
from ..policy import NONE
from ..torch_names import all_gather_single, reduce_scatter_single
from ..warm_start import WarmStart
from . import reductions


@dataclass
class _Member:
    """A parameter's place in its bucket: elements [begin, end) of the flat buffer."""

    name: str
    parameter: Tensor
    begin: int
    end: int
    seen: int = 0  # gradient contributions added in this step


@dataclass
class Bucket:
    """Parameters that travel as one message.

    label: what its parameters have in common. master: fp32, 1-D, this rank's shard of the parameters (all of them
    when not sharded), zeros as padding at the end. grad: fp32, as long as master; filled by
    ``GradientSync.finish``: the mean gradient over the group.
    """

    label: Hashable
    dtype: torch.dtype
    members: list[_Member]
    master: Tensor = field(default_factory=lambda: torch.empty(0))
    grad: Tensor = field(default_factory=lambda: torch.empty(0))
    flat: Tensor = field(default_factory=lambda: torch.empty(0))  # fp32 sum over micro-batches, padded
    feedback: Feedback | None = None
    warm_start: WarmStart | None = None  # of low-rank reductions
    unscaled: bool = False  # the loss scale has been divided out of ``flat`` already
    missing: int = 0  # contributions that have not arrived yet
    work: dist.Work | None = None

    def states(self) -> list[StepState]:
        """What a step's reduction changes for the next one."""
        return [state for state in (self.feedback, self.warm_start) if state is not None]


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, detached, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_gradient(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor):
        # Some gradients arrive as Partial (norms under sequence parallelism): flattening those as they are
        # would silently drop the other ranks' part.
        assert isinstance(parameter, DTensor)
        if grad.placements != parameter.placements:
            grad = grad.redistribute(placements=parameter.placements)
        return grad.to_local()
    return grad


class GradientSync:
    """Averages gradients over a process group while backward runs, and gathers updated parameters.

    One step is: ``start``, the backward passes, ``finish``, an optimizer that changes ``Bucket.master`` by
    ``Bucket.grad``, then ``commit`` and ``gather``; or ``skip`` instead of the last three.

    parameters: (name, parameter) in the order of the forward pass, the same on all ranks of the group; a DTensor is
    taken by its local shard. group: None or of size 1 means no communication. labels: name -> label; a bucket
    holds parameters of one label and one dtype. sharded: reduce-scatter and gather instead of all-reduce.
    bucket_bytes: a bucket is closed when its fp32 gradients reach this size. rollback: keep what is needed to
    undo what a skipped step did to residuals and to what low-rank reductions start from.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        group: dist.ProcessGroup | None,
        *,
        labels: Callable[[str], Hashable] = lambda name: None,
        sharded: bool = True,
        bucket_bytes: int = 4 << 20,
        rollback: bool = False,
    ) -> None:
        self.group = group
        self.sharded = sharded
        self.rollback = rollback
        self._size = group.size() if group is not None else 1
        self._rank = group.rank() if group is not None else 0
        self._backwards = 0
        self._scale = 1.0
        self._next = 0  # index of the bucket that is launched next: the same order on every rank
        self._sent = 0  # compressed buckets, since reductions or gathers began
        self._handles: list[RemovableHandle] = []
        self.buckets = _make_buckets(list(parameters), labels, bucket_bytes)
        for bucket in self.buckets:
            self._allocate(bucket)
            for member in bucket.members:
                register: Any = member.parameter.register_post_accumulate_grad_hook
                self._handles.append(register(_hook(self, bucket, member)))

    def masters(self) -> list[Tensor]:
        """What the optimizer changes: every bucket's fp32 master; ``finish`` sets their ``grad``."""
        return [bucket.master for bucket in self.buckets]

    def start(self, backwards: int = 1, scale: float = 1.0) -> None:
        """Begin a step. backwards: contributions per parameter to wait for; scale: their common factor."""
        self._backwards = backwards
        self._scale = scale
        self._next = self._sent = 0
        for bucket in self.buckets:
            bucket.missing = backwards * len(bucket.members)
            bucket.unscaled = False
            bucket.flat[bucket.members[-1].end :].zero_()  # the last gather's values are still there
            for state in bucket.states():
                state.begin()
            for member in bucket.members:
                member.seen = 0
                member.parameter.grad = None

    def finish(self) -> None:
        """Launch what was not launched, wait for all of it and fill ``Bucket.grad``."""
        for bucket in self.buckets[self._next :]:
            for member in bucket.members:
                # Zero-bubble schedules add weight gradients outside of autograd: no hook has seen those.
                if member.parameter.grad is not None:
                    self._take(bucket, member)
                if member.seen == 0:
                    bucket.flat[member.begin : member.end].zero_()
            self._launch(bucket)
        self._next = len(self.buckets)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
            scale = 1.0 if bucket.unscaled else self._scale
            if scale * self._size != 1.0:
                bucket.grad.div_(scale * self._size)
            # A lossy codec may decode the zeros of the padding to something else, which the norm would count.
            bucket.grad[self._numel(bucket) :].zero_()
            bucket.master.grad = bucket.grad

    def close(self) -> None:
        """Let go of the parameters: their gradients stay with them again. Before another sync takes them over."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def commit(self) -> None:
        """The step was taken."""

    def skip(self) -> None:
        """The step was not taken: residuals, and what low-rank reductions start from, go back to what they were."""
        for bucket in self.buckets:
            for state in bucket.states():
                state.rollback()

    @torch.no_grad()
    def gather(self) -> None:
        """Bring the parameters to the masters' values, in place, in their dtype, with the same bits on every rank.

        With ``difference`` in the policy, what travels is master minus parameter: what one step's encoding
        loses is in the next step's difference, so the error does not add up. If a peer is lost (PeerError), no parameter
        has changed.
        """
        self._sent = 0
        pending = [(bucket, *self._start_gather(bucket)) for bucket in self.buckets]
        for _, work, _, _ in pending:
            if work is not None:
                work.wait()
        # Only when all of it is here: a message that fails leaves every parameter as it was.
        for bucket, _, values, difference in pending:
            for member in bucket.members:
                target = local_tensor(member.parameter)
                new = values[member.begin : member.end].view(target.shape)
                if difference:
                    target.add_(new)
                else:
                    target.copy_(new)

    def _start_gather(self, bucket: Bucket) -> tuple[dist.Work | None, Tensor, bool]:
        """The Work, the flat buffer that it fills, and whether those are differences."""
        group = self.group
        if not self.sharded or group is None or self._size == 1:
            return None, bucket.master, False
        if isinstance(group, ThinwireGroup):
            nbytes = bucket.flat.numel() * bucket.dtype.itemsize
            codec, policy, message = group.look_up("all_gather", bucket.dtype, nbytes)
            if codec != NONE:
                # Differences are small against the values they are added to, so they are formed in fp32.
                dtype = torch.float32 if policy.difference else bucket.dtype
                shard = bucket.master.to(dtype)
                if policy.difference:
                    shard = shard - self._parameter_shard(bucket)
                values = self._gather_buffer(bucket, dtype)
                outs, options = equal_parts(values, self._size), group.call_options(policy, message)

                def call(transport: Metered) -> None:
                    c.all_gather(shard, outs, codec, transport, options)

                work: dist.Work | None = group.submit(message, call, values, lane=self._sent)
                self._sent += 1
                return work, values, policy.difference
        values = self._gather_buffer(bucket, bucket.dtype)
        work = all_gather_single(values, bucket.master.to(bucket.dtype), group=group, async_op=True)
        return work, values, False

    def _numel(self, bucket: Bucket) -> int:
        """Values of this rank's shard of a bucket, without the padding behind them."""
        return max(bucket.members[-1].end - self._start(bucket), 0)

    def _start(self, bucket: Bucket) -> int:
        """Where this rank's shard begins in the flat buffer."""
        return self._rank * bucket.grad.numel() if self.sharded else 0

    @staticmethod
    def _gather_buffer(bucket: Bucket, dtype: torch.dtype) -> Tensor:
        """Where gathered values arrive. The gradients in ``flat`` have been used by then."""
        return bucket.flat if dtype == bucket.flat.dtype else torch.empty_like(bucket.flat, dtype=dtype)

    def _parameter_shard(self, bucket: Bucket) -> Tensor:
        """This rank's shard of a bucket's parameters as they are now, fp32, flat, zeros as padding."""
        return self.shard_of(bucket, {m.name: local_tensor(m.parameter) for m in bucket.members})

    def shard_of(self, bucket: Bucket, values: Mapping[str, Tensor]) -> Tensor:
        """This rank's shard of the values of a bucket's parameters by name, fp32, flat, zeros as padding."""
        start, shard = self._start(bucket), torch.zeros_like(bucket.grad)
        for member in bucket.members:
            begin, end = max(member.begin, start), min(member.end, start + shard.numel())
            if begin < end:
                part = values[member.name].reshape(-1)[begin - member.begin : end - member.begin]
                shard[begin - start : end - start] = part
        return shard

    def state_dict(self) -> dict[str, Tensor]:
        """Masters by bucket, residuals and Q of low-rank reductions by parameter, the group's count of calls; this rank's.

        They share memory with the live ones. Parameters are not in it: with ``difference`` they are what the next
        difference is formed against, so a checkpoint holds them bit for bit, too.
        """
        state = {f"bucket{i}.master": bucket.master for i, bucket in enumerate(self.buckets)}
        for bucket in self.buckets:
            for kept in bucket.states():
                state |= kept.state_dict()
        if isinstance(self.group, ThinwireGroup):
            state["calls"] = self.group.calls
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take back what ``state_dict`` gave, into the live tensors.

        The parameters are restored by whoever saved them; no ``gather`` is needed, and with a lossy codec one more
        would change them. Raises CheckpointError for a tensor that is missing or of another size.
        """
        live = self.state_dict()
        for name, tensor in live.items():
            saved = state.get(name)
            if saved is None or saved.shape != tensor.shape:
                found = "nothing" if saved is None else f"{tuple(saved.shape)}"
                raise CheckpointError(
                    f"gradient sync state {name}: shape {tuple(tensor.shape)} expected, found {found}; resume with the "
                    "policy, bucket size and number of ranks that the checkpoint was written with"
                )
        for name, tensor in live.items():
            tensor.copy_(state[name])

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Take the masters from the parameters again, after those were set from outside."""
        for bucket in self.buckets:
            bucket.master.copy_(self._parameter_shard(bucket))

    def _allocate(self, bucket: Bucket) -> None:
        numel = bucket.members[-1].end
        if self.sharded:
            numel += -numel % self._size
        bucket.flat = torch.zeros(numel, device=bucket.members[0].parameter.device)
        bucket.grad = bucket.flat
        if self.sharded and self._size > 1:
            bucket.grad = torch.zeros(numel // self._size, device=bucket.flat.device)
        bucket.master = self._parameter_shard(bucket)
        self._make_states(bucket)

    def _arrived(self, bucket: Bucket, member: _Member) -> None:
        if bucket.work is not None or member.seen >= self._backwards:
            raise UnsupportedError(
                f"parameter {member.name} got a gradient more than {self._backwards} time(s) in this step; call "
                "start(backwards) before the backward passes of every step, with their number"
            )
        self._take(bucket, member)
        bucket.missing -= 1
        # A bucket never overtakes an earlier one: all ranks launch in the same order.
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._launch(self.buckets[self._next])
            self._next += 1

    @torch.no_grad()
    def _take(self, bucket: Bucket, member: _Member) -> None:
        target = bucket.flat[member.begin : member.end]
        grad = _local_gradient(member.parameter).reshape(-1)
        if member.seen == 0:
            target.copy_(grad)
        else:
            target.add_(grad)
        member.seen += 1
        member.parameter.grad = None

    def _launch(self, bucket: Bucket) -> None:
        if self.group is None or self._size == 1:
            return
        op = "reduce_scatter" if self.sharded else "all_reduce"
        nbytes = bucket.flat.numel() * bucket.flat.element_size()
        if isinstance(self.group, ThinwireGroup):
            codec, policy, message = self.group.look_up_gradient(op, bucket.flat.dtype, nbytes)
            if codec != NONE:
                if self._scale != 1.0:
                    bucket.flat.div_(self._scale)  # residuals are unscaled
                    bucket.unscaled = True
                call = self._reduction(bucket, codec, self.group.call_options(policy, message))
                bucket.work = self.group.submit(message, call, bucket.grad, lane=self._sent)
                self._sent += 1
                return
        if self.sharded:
            bucket.work = reduce_scatter_single(bucket.grad, bucket.flat, group=self.group, async_op=True)
        else:
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    def _reduction(
        self, bucket: Bucket, compressor: Compressor, options: CallOptions
    ) -> Callable[[Metered], None]:
        """The compressed reduction of a bucket: the sum over the group in ``bucket.grad``."""
        flat, out, kept = bucket.flat, bucket.grad, (bucket.feedback, bucket.warm_start)
        if self.sharded:
            return lambda t: reductions.reduce_scatter(flat, out, compressor, kept, t, options)
        return lambda t: reductions.all_reduce(flat, compressor, kept, t, options)

    def _make_states(self, bucket: Bucket) -> None:
        """What is kept for a bucket from step to step, as the policy asks for it; nothing if it is not compressed."""
        if not isinstance(self.group, ThinwireGroup):
            return
        op = "reduce_scatter" if self.sharded else "all_reduce"
        flat = bucket.flat
        compressor, policy, message = self.group.look_up_gradient(op, flat.dtype, flat.nbytes)
        bucket.feedback, bucket.warm_start = reductions.make_states(
            [Span(m.name, m.begin, m.end, tuple(local_tensor(m.parameter).shape)) for m in bucket.members],
            flat.numel(),
            self.group,
            compressor,
            policy,
            axis=message.axis,
            owns_chunk=not self.sharded,
            rollback=self.rollback,
            device=flat.device,
        )


def _hook(sync: GradientSync, bucket: Bucket, member: _Member) -> Callable[[Tensor], None]:
    """Tell ``sync`` of a gradient. Only weakly: what a parameter's hook holds is never collected."""
    sync_ref, bucket_ref, member_ref = ref(sync), ref(bucket), ref(member)

    def hook(_: Tensor) -> None:
        to, full, part = sync_ref(), bucket_ref(), member_ref()
        if to is not None and full is not None and part is not None:
            to._arrived(full, part)

    return hook


def _make_buckets(
    parameters: list[tuple[str, Tensor]], labels: Callable[[str], Hashable], bucket_bytes: int
) -> list[Bucket]:
    """Fill buckets in the order in which gradients arrive (backwards), and sort them by when they are full."""
    open_buckets: dict[tuple[Hashable, torch.dtype], Bucket] = {}
    full: list[Bucket] = []
    for name, parameter in reversed(parameters):
        if not parameter.requires_grad:
            continue
        key = (labels(name), parameter.dtype)
        bucket = open_buckets.pop(key, None) or Bucket(*key, members=[])
        begin = bucket.members[-1].end if bucket.members else 0
        end = begin + local_tensor(parameter).numel()
        bucket.members.append(_Member(name, parameter, begin, end))
        if end * 4 >= bucket_bytes:
            full.append(bucket)
        else:
            open_buckets[key] = bucket
    position = {name: i for i, (name, _) in enumerate(reversed(parameters))}
    return sorted([*full, *open_buckets.values()], key=lambda b: position[b.members[-1].name])
