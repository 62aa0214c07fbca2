"""The drop-in process group: ``init_process_group("thinwire", pg_options=GroupOptions(...))``.

Training code keeps calling ``torch.distributed``; this group looks each message up in the policy and either
hands it to the inner group (gloo, NCCL) as it is, or sends it through a codec on a worker thread.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from .. import collectives as c
from ..collectives.frames import equal_parts
from ..collectives.options import derive_seed
from ..collectives.traffic import PASS_THROUGH, Message
from ..collectives.transport import Metered
from ..errors import PolicyError
from ..policy import NONE
from .base import BACKEND, ROLE_TAGS, GroupBase
from .options import GroupOptions
from .tensors import check_share, flat_view, nbytes_of, split_rows

_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


class ThinwireGroup(GroupBase):
    """A ``torch.distributed`` group that compresses by policy. Made by ``init_process_group`` or ``new_group``."""

    # Collectives.

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> dist.Work:  # type: ignore[override]
        # One tensor, and an op instead of options, are what DDP's join gives.
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = opts if isinstance(opts, dist.AllreduceOptions) else _all_reduce_options(opts)
        x = tensors[0]
        reduction = self._reduction_of(x)
        if reduction is not None:
            return reduction(opts.reduceOp)
        codec, policy, message = self.look_up("all_reduce", x.dtype, nbytes_of(x))
        if codec == NONE or not _sums(opts) or x.layout != torch.strided:
            return self._pass(message, lambda: self._inner.allreduce(tensors, opts))
        options = self.call_options(policy, message, mean=opts.reduceOp == _AVG)

        def call(transport: Metered) -> None:
            with flat_view(x) as flat:
                c.all_reduce(flat, codec, transport, options)

        return self.submit(message, call, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.AllreduceCoalescedOptions()
        if not _sums(opts) or self._all_pass("all_reduce", tensors):
            message = self.look_up("all_reduce", tensors[0].dtype, sum(map(nbytes_of, tensors)))[2]
            return self._pass(message, lambda: self._inner.allreduce_coalesced(tensors, opts))
        return c.Joined([self.allreduce([x], opts.reduceOp) for x in tensors], tensors)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        codec, policy, message = self.look_up("reduce_scatter", input.dtype, nbytes_of(input))
        check_share("reduce_scatter", output, input, self._size)
        if codec == NONE or not _sums(opts):
            return self._pass(message, lambda: self._inner._reduce_scatter_base(output, input, opts))
        options = self.call_options(policy, message, mean=opts.reduceOp == _AVG)
        chunks = c.Chunks(input.numel(), self._size, output.numel())

        def call(transport: Metered) -> None:
            flat = input.contiguous().view(-1)
            output.copy_(c.reduce_scatter(flat, codec, transport, chunks, options).view_as(output))

        return self.submit(message, call, [output])

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        # Lists may hold tensors of different sizes: they travel in one flat buffer, padded to the largest.
        out, parts = outputs[0], inputs[0]
        width = max(p.numel() for p in parts)
        chunks = c.Chunks(width * self._size, self._size, width)
        codec, policy, message = self.look_up("reduce_scatter", out.dtype, chunks.numel * out.element_size())
        if codec == NONE or not _sums(opts):
            return self._pass(message, lambda: self._inner.reduce_scatter(outputs, inputs, opts))
        options = self.call_options(policy, message, mean=opts.reduceOp == _AVG)

        def call(transport: Metered) -> None:
            flat = out.new_zeros(chunks.numel)
            for p, part in enumerate(parts):
                flat[p * width : p * width + part.numel()] = part.reshape(-1)
            shard = c.reduce_scatter(flat, codec, transport, chunks, options)
            out.copy_(shard[: out.numel()].view_as(out))

        return self.submit(message, call, outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        if not _sums(opts) or self._all_pass("reduce_scatter", inputs):
            message = self.look_up("reduce_scatter", inputs[0].dtype, sum(map(nbytes_of, inputs)))[2]
            return self._pass(
                message, lambda: self._inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
            )
        pairs = zip(outputs, inputs, strict=True)
        return c.Joined([self.reduce_scatter_single(out, inp, opts) for out, inp in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else AllgatherOptions()
        codec, policy, message = self.look_up("all_gather", input.dtype, nbytes_of(output))
        check_share("all_gather", input, output, self._size)
        if codec == NONE:
            return self._pass(message, lambda: self._inner._allgather_base(output, input, opts))
        options = self.call_options(policy, message)

        def call(transport: Metered) -> None:
            with flat_view(output) as flat:
                c.all_gather(
                    input.contiguous().view(-1), equal_parts(flat, self._size), codec, transport, options
                )

        return self.submit(message, call, [output])

    _allgather_base = all_gather_single

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts if opts is not None else AllgatherOptions()
        x, outs = inputs[0], outputs[0]
        codec, policy, message = self.look_up("all_gather", x.dtype, sum(nbytes_of(o) for o in outs))
        if codec == NONE:
            return self._pass(message, lambda: self._inner.allgather(outputs, inputs, opts))
        options = self.call_options(policy, message)

        def call(transport: Metered) -> None:
            flats = [o.new_empty(o.numel()) for o in outs]
            c.all_gather(x.contiguous().view(-1), flats, codec, transport, options)
            for out, flat in zip(outs, flats, strict=True):
                out.copy_(flat.view_as(out))

        return self.submit(message, call, outputs)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts if opts is not None else AllgatherOptions()
        if self._all_pass("all_gather", outputs):
            message = self.look_up("all_gather", outputs[0].dtype, sum(map(nbytes_of, outputs)))[2]
            return self._pass(
                message, lambda: self._inner.allgather_into_tensor_coalesced(outputs, inputs, opts)
            )
        pairs = zip(outputs, inputs, strict=True)
        return c.Joined([self.all_gather_single(out, inp, opts) for out, inp in pairs], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def all_to_all_single(
        self, output: Tensor, input: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> dist.Work:
        opts = opts if opts is not None else dist.AllToAllOptions()
        # Whether a message is small must be judged by what all ranks see alike: with uneven splits, they don't.
        even = not (out_splits or in_splits)
        codec, policy, message = self.look_up("all_to_all", input.dtype, nbytes_of(input), any_size=not even)
        if codec == NONE:
            return self._pass(
                message, lambda: self._inner.alltoall_base(output, input, out_splits, in_splits, opts)
            )
        options = self.call_options(policy, message)

        def call(transport: Metered) -> None:
            with flat_view(output) as flat:
                source = input.contiguous().view(-1)
                outs = split_rows(flat, output, out_splits, self._size)
                ins = split_rows(source, input, in_splits, self._size)
                c.all_to_all(ins, outs, codec, transport, options, even=even)

        return self.submit(message, call, [output])

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.AllToAllOptions()
        nbytes = sum(nbytes_of(x) for x in inputs)
        codec, policy, message = self.look_up("all_to_all", inputs[0].dtype, nbytes, any_size=True)
        if codec != NONE:
            options = self.call_options(policy, message)

            def call(transport: Metered) -> None:
                sources = [x.contiguous().view(-1) for x in inputs]
                flats = [o.new_empty(o.numel()) for o in outputs]
                c.all_to_all(sources, flats, codec, transport, options)
                for out, flat in zip(outputs, flats, strict=True):
                    out.copy_(flat.view_as(out))

            return self.submit(message, call, outputs)
        # gloo has no alltoall of lists; as one flat tensor with splits, every inner group has it.
        source = torch.cat([x.reshape(-1) for x in inputs])
        target = outputs[0].new_empty(sum(o.numel() for o in outputs))
        out_splits, in_splits = [o.numel() for o in outputs], [x.numel() for x in inputs]
        self._pass(
            message, lambda: self._inner.alltoall_base(target, source, out_splits, in_splits, opts)
        ).wait()
        for out, part in zip(outputs, torch.split(target, out_splits), strict=True):
            out.copy_(part.view_as(out))
        return c.done(outputs)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        opts = opts if opts is not None else dist.BroadcastOptions()
        x = tensors[0]
        codec, policy, message = self.look_up("broadcast", x.dtype, nbytes_of(x))
        if codec == NONE:
            return self._pass(message, lambda: self._inner.broadcast(tensors, opts))
        options, root = self.call_options(policy, message), opts.rootRank

        def call(transport: Metered) -> None:
            with flat_view(x) as flat:
                c.broadcast(flat, codec, transport, root, options)

        return self.submit(message, call, tensors)

    # Point to point: FIFO per (peer, direction), as pipelining relies on; of tags only those of roles matter.

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        x = tensors[0]
        codec, _, message = self.look_up("send", x.dtype, nbytes_of(x), role=ROLE_TAGS.get(tag))
        if codec == NONE:
            return self._pass(message, lambda: self._inner.send(tensors, dst, tag))
        # The ranks of a pipeline do not send equally often, so sends have a count of their own.
        seed = derive_seed(self._next_seed(1), self._rank, dst)
        return self.submit(
            message,
            lambda transport: c.send(x.contiguous().view(-1), codec, transport, dst, seed),
            tensors,
            queue=f"send-{dst}",
        )

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        x = tensors[0]
        codec, _, message = self.look_up("send", x.dtype, nbytes_of(x), role=ROLE_TAGS.get(tag))
        message = dataclasses.replace(message, op="recv")
        if codec == NONE:
            return self._pass(message, lambda: self._inner.recv(tensors, src, tag))

        def call(transport: Metered) -> None:
            with flat_view(x) as flat:
                c.recv(flat, codec, transport, src)

        return self.submit(message, call, tensors, queue=f"recv-{src}")

    # Passed through always: control traffic and what has no compressed form.

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        return self._inner.recv_anysource(tensors, tag)

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.BarrierOptions()
        message = Message(self.axis(), "barrier", "control", PASS_THROUGH, "none", 0)
        return self._watched(message, lambda: self._inner.barrier(opts), lambda seconds: None)

    def gather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        message = self.look_up("gather", inputs[0].dtype, nbytes_of(inputs[0]) * self._size)[2]
        return self._pass(message, lambda: self._inner.gather(outputs, inputs, opts or dist.GatherOptions()))

    def scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        message = self.look_up("scatter", outputs[0].dtype, nbytes_of(outputs[0]) * self._size)[2]
        return self._pass(
            message, lambda: self._inner.scatter(outputs, inputs, opts or dist.ScatterOptions())
        )

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        message = self.look_up("reduce", tensors[0].dtype, nbytes_of(tensors[0]))[2]
        return self._pass(message, lambda: self._inner.reduce(tensors, opts or dist.ReduceOptions()))

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a block. Nothing is coalesced: each of its calls goes out by itself."""
        self._block = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """One Work for all calls since ``_start_coalescing``."""
        block, self._block = self._block or [], None
        return c.Joined(block, None)


def _sums(opts: Any) -> bool:
    """SUM and AVG are linear, so their terms may be encoded; MIN, MAX, PROD and bit operations pass through."""
    # ReduceOp compares with a member by ==, but not from the member's side, which "in" would do.
    return bool(opts.reduceOp == _SUM or opts.reduceOp == _AVG)


def _all_reduce_options(op: Any = None) -> Any:
    options = dist.AllreduceOptions()
    if op is not None:
        options.reduceOp = op
    return options


def _given_or_worlds(options: GroupOptions | None) -> GroupOptions:
    """A new group's options; without any of its own, those of the world."""
    if options is not None:
        return options
    world = dist.group.WORLD
    if not isinstance(world, ThinwireGroup):
        raise PolicyError(
            'a thinwire group needs a policy: init_process_group("thinwire", pg_options='
            "thinwire.GroupOptions(policy=...))"
        )
    # What was said of the world's own messages does not hold for those of a sub-group.
    return dataclasses.replace(world.options, axis=None, op_axes={}, op_roles={})


def register(backend: str = BACKEND, group: type[ThinwireGroup] = ThinwireGroup) -> None:
    """Make a group class known to ``torch.distributed`` as ``backend``. ``import thinwire`` registers "thinwire"."""

    def create(opts: Any, options: GroupOptions | None) -> ThinwireGroup:
        return group(opts.store, opts.group_rank, opts.group_size, _given_or_worlds(options), opts.timeout)

    if not hasattr(dist.Backend, backend.upper()):
        dist.Backend.register_backend(backend, create, extended_api=True, devices=["cpu", "cuda"])
