"""The drop-in process group: ``init_process_group("thinwire", pg_options=GroupOptions(...))``.

Training code keeps calling ``torch.distributed``; this group looks each message up in the policy and either
hands it to the inner group (gloo, NCCL) as it is, or sends it through a codec on a worker thread.

Two inner groups, because gloo and NCCL match collectives by the order of the calls: one for what passes
through in the caller's order, one for frames in the worker's order.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from . import collectives as c
from .codecs import Codec
from .collectives.endpoint import COLLECTIVES, Endpoint
from .collectives.frames import equal_parts
from .collectives.options import CallOptions, derive_seed
from .collectives.traffic import PASS_THROUGH, Message, Tally, Traffic, gloo_nbytes, raw_nbytes
from .collectives.transport import Metered, TorchTransport
from .errors import PolicyError, UnsupportedError
from .inner import Counted, agree, make_inner_group, meet
from .policy import AXES, NONE, AxisPolicy, Policy
from .presets import load
from .wire import VERSION

BACKEND = "thinwire"
_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


@dataclass(frozen=True)
class GroupOptions:
    """What a thinwire group is told at construction; equal on all its ranks.

    policy: a Policy, a preset's name or a TOML file. axis: this group's axis; None: from the device mesh's
    dimension name. op_axes: another axis for some ops (FSDP gathers parameters, axis ``zero``, over the
    group that reduces gradients, axis ``dp``). op_roles: the role of an op's messages, where it is known.
    axis_names: mesh dimension name -> axis, for meshes with other names. feedback_by_caller: who made
    this group runs error feedback itself, so a policy that asks for it is accepted. inline: run compressed
    collectives in the caller's thread, for axes whose callers wait at once (tensor parallelism); saves two
    changes of thread a call, overlaps nothing. backend: the inner group's.
    """

    policy: Policy | str = "none"
    axis: str | None = None
    op_axes: Mapping[str, str] = field(default_factory=dict)
    op_roles: Mapping[str, str] = field(default_factory=dict)
    axis_names: Mapping[str, str] = field(default_factory=dict)
    feedback_by_caller: bool = False
    inline: bool = False
    backend: str = "gloo"
    seed: int = 0
    timeout: timedelta = timedelta(minutes=30)

    @property
    def _timeout(self) -> timedelta:  # DeviceMesh reads it from any backend's options
        return self.timeout

    def text(self) -> str:
        """What the ranks of a group must give alike, beside the policy."""
        maps = (sorted(m.items()) for m in (self.op_axes, self.op_roles, self.axis_names))
        return f"axis {self.axis}, maps {list(maps)}, backend {self.backend}, seed {self.seed}"


class ThinwireGroup(dist.ProcessGroup):
    """A ``torch.distributed`` group that compresses by policy. Made by ``init_process_group`` or ``new_group``."""

    def __init__(self, store: Store, rank: int, size: int, options: GroupOptions, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.options = options
        self.policy = load(options.policy)
        self.traffic = Traffic()
        self._rank, self._size = rank, size
        self._name = self._desc = "undefined"
        # Compressed collectives and sends so far. Seeds depend on them, so checkpoints hold them (in place).
        self.calls = torch.zeros(2, dtype=torch.int64)
        self._calls_lock = threading.Lock()  # hooks call from autograd's threads
        self._known: dict[Any, tuple[Codec, AxisPolicy, Message]] = {}  # every message takes this way
        self._block: list[dist.Work] | None = None  # the calls of a coalescing block
        if options.axis is not None:
            self._check_policy()
        agree(store, rank, size, f"wire format {VERSION}, {options.text()}, policy {self.policy}")
        device = torch.device("cpu" if options.backend == "gloo" else "cuda")
        self._inner = self.make_inner(PrefixStore("pass", store), timeout)
        self._frames: dist.ProcessGroup | None = None
        self._endpoint: Endpoint | None = None
        if any(p.compresses for p in self.policy.axes.values()):
            self._frames = self.make_inner(PrefixStore("frames", store), timeout)
            self._endpoint = Endpoint(TorchTransport(self._frames), self.traffic, device=device)
        # What is not overridden here falls through to the inner group's backend.
        self._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, self._inner._get_backend(device))
        meet(store, rank, size)

    def make_inner(self, store: Store, timeout: timedelta) -> dist.ProcessGroup:
        """A real group of the backend that carries the bytes; a subclass may put something around it."""
        return make_inner_group(store, self._rank, self._size, self.options.backend, timeout)

    # Identity: DeviceMesh and the functional collectives look groups up by these.

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc
        self._known.clear()
        self._check_policy()

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    group_name = property(getGroupName, _set_group_name)
    group_desc = property(getGroupDesc, _set_group_desc)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    # Policy.

    def axis(self, op: str = "") -> str:
        """The axis of an op's messages: given explicitly, else the mesh dimension's, else "dp" by default."""
        if op in self.options.op_axes:
            return self.options.op_axes[op]
        if self.options.axis is not None:
            return self.options.axis
        name = self._desc.removeprefix("mesh_")
        name = self.options.axis_names.get(name, name)
        return name if name in AXES else "dp"

    def _check_policy(self) -> None:
        for axis in {self.axis(), *self.options.op_axes.values()}:
            policy = self.policy.axis(axis)
            if policy.feedback and not self.options.feedback_by_caller:
                raise PolicyError(
                    f"policy {self.policy.name}, axis {axis}: error feedback needs to know the parameters, which a "
                    "bare group does not see; use thinwire.GradientSync, or a policy with feedback = false"
                )
            if policy.difference and not self.options.feedback_by_caller:
                raise PolicyError(
                    f"policy {self.policy.name}, axis {axis}: differences need the value that was sent last, which a "
                    "bare group does not keep; use thinwire.GradientSync, or a policy with difference = false"
                )
            unknown = set(policy.roles) - set(self.options.op_roles.values())
            if unknown:
                raise PolicyError(
                    f"policy {self.policy.name}, axis {axis}: names the role(s) {sorted(unknown)}, which a bare "
                    "group does not see; give GroupOptions.op_roles, or put the codec on the op"
                )

    def look_up(
        self, op: str, dtype: torch.dtype, nbytes: int, *, any_size: bool = False
    ) -> tuple[Codec, AxisPolicy, Message]:
        """What the policy says of a message of ``nbytes`` (see :func:`raw_nbytes`): ``none`` means pass through.

        any_size: small messages too, for calls whose sizes the ranks do not see alike.
        """
        key = op, dtype, nbytes, any_size
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._look_up(*key)
        return found

    def _look_up(
        self, op: str, dtype: torch.dtype, nbytes: int, any_size: bool
    ) -> tuple[Codec, AxisPolicy, Message]:
        axis, role = self.axis(op), self.options.op_roles.get(op, "unknown")
        policy = self.policy.axis(axis)
        judged = max(nbytes, policy.min_nbytes) if any_size else nbytes
        codec = policy.codec(op, role, dtype, judged) if self._endpoint is not None else NONE
        name = PASS_THROUGH if codec == NONE else str(codec)
        return codec, policy, Message(axis, op, role, name, str(dtype).removeprefix("torch."), nbytes)

    def call_options(self, policy: AxisPolicy, *, mean: bool = False) -> CallOptions:
        """Options of the next call; its seed is different for each call and the same on all ranks."""
        seed = self._next_seed(0)
        return CallOptions(mean=mean, seed=seed, algorithm=policy.algorithm)

    # Collectives.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        opts = opts if opts is not None else dist.AllreduceOptions()
        x = tensors[0]
        codec, policy, message = self.look_up("all_reduce", x.dtype, _nbytes(x))
        if codec == NONE or not _sums(opts):
            return self._pass(message, lambda: self._inner.allreduce(tensors, opts))
        options = self.call_options(policy, mean=opts.reduceOp == _AVG)

        def call(transport: Metered) -> None:
            with _flat(x) as flat:
                c.all_reduce(flat, codec, transport, options)

        return self.submit(message, call, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.AllreduceCoalescedOptions()
        if not _sums(opts) or self._all_pass("all_reduce", tensors):
            message = self.look_up("all_reduce", tensors[0].dtype, sum(map(_nbytes, tensors)))[2]
            return self._pass(message, lambda: self._inner.allreduce_coalesced(tensors, opts))
        return c.Joined([self.allreduce([x], _as_allreduce(opts)) for x in tensors], tensors)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        codec, policy, message = self.look_up("reduce_scatter", input.dtype, _nbytes(input))
        _check_share("reduce_scatter", output, input, self._size)
        if codec == NONE or not _sums(opts):
            return self._pass(message, lambda: self._inner._reduce_scatter_base(output, input, opts))
        options = self.call_options(policy, mean=opts.reduceOp == _AVG)
        chunks = c.Chunks(input.numel(), self._size, output.numel())

        def call(transport: Metered) -> None:
            flat = input.contiguous().view(-1)
            output.copy_(_reduce(flat, codec, transport, chunks, options).view_as(output))

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
        options = self.call_options(policy, mean=opts.reduceOp == _AVG)

        def call(transport: Metered) -> None:
            flat = out.new_zeros(chunks.numel)
            for p, part in enumerate(parts):
                flat[p * width : p * width + part.numel()] = part.reshape(-1)
            shard = _reduce(flat, codec, transport, chunks, options)
            out.copy_(shard[: out.numel()].view_as(out))

        return self.submit(message, call, outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        if not _sums(opts) or self._all_pass("reduce_scatter", inputs):
            message = self.look_up("reduce_scatter", inputs[0].dtype, sum(map(_nbytes, inputs)))[2]
            return self._pass(
                message, lambda: self._inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
            )
        pairs = zip(outputs, inputs, strict=True)
        return c.Joined([self.reduce_scatter_single(out, inp, opts) for out, inp in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else AllgatherOptions()
        codec, policy, message = self.look_up("all_gather", input.dtype, _nbytes(output))
        _check_share("all_gather", input, output, self._size)
        if codec == NONE:
            return self._pass(message, lambda: self._inner._allgather_base(output, input, opts))
        options = self.call_options(policy)

        def call(transport: Metered) -> None:
            with _flat(output) as flat:
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
        codec, policy, message = self.look_up("all_gather", x.dtype, sum(_nbytes(o) for o in outs))
        if codec == NONE:
            return self._pass(message, lambda: self._inner.allgather(outputs, inputs, opts))
        options = self.call_options(policy)

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
            message = self.look_up("all_gather", outputs[0].dtype, sum(map(_nbytes, outputs)))[2]
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
        codec, policy, message = self.look_up(
            "all_to_all", input.dtype, _nbytes(input), any_size=bool(out_splits or in_splits)
        )
        if codec == NONE:
            return self._pass(
                message, lambda: self._inner.alltoall_base(output, input, out_splits, in_splits, opts)
            )
        options = self.call_options(policy)

        def call(transport: Metered) -> None:
            with _flat(output) as flat:
                source = input.contiguous().view(-1)
                outs = _split(flat, output, out_splits, self._size)
                c.all_to_all(_split(source, input, in_splits, self._size), outs, codec, transport, options)

        return self.submit(message, call, [output])

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts if opts is not None else dist.AllToAllOptions()
        nbytes = sum(_nbytes(x) for x in inputs)
        codec, policy, message = self.look_up("all_to_all", inputs[0].dtype, nbytes, any_size=True)
        if codec != NONE:
            options = self.call_options(policy)

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
        codec, policy, message = self.look_up("broadcast", x.dtype, _nbytes(x))
        if codec == NONE:
            return self._pass(message, lambda: self._inner.broadcast(tensors, opts))
        options, root = self.call_options(policy), opts.rootRank

        def call(transport: Metered) -> None:
            with _flat(x) as flat:
                c.broadcast(flat, codec, transport, root, options)

        return self.submit(message, call, tensors)

    # Point to point: FIFO per (peer, direction), as pipelining relies on.

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        x = tensors[0]
        codec, _, message = self.look_up("send", x.dtype, _nbytes(x))
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
        codec, _, message = self.look_up("send", x.dtype, _nbytes(x))
        message = dataclasses.replace(message, op="recv")
        if codec == NONE:
            return self._pass(message, lambda: self._inner.recv(tensors, src, tag))

        def call(transport: Metered) -> None:
            with _flat(x) as flat:
                c.recv(flat, codec, transport, src)

        return self.submit(message, call, tensors, queue=f"recv-{src}")

    # Passed through always: control traffic and what has no compressed form.

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        return self._inner.recv_anysource(tensors, tag)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._inner.barrier(opts if opts is not None else dist.BarrierOptions())

    def gather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        message = self.look_up("gather", inputs[0].dtype, _nbytes(inputs[0]) * self._size)[2]
        return self._pass(message, lambda: self._inner.gather(outputs, inputs, opts or dist.GatherOptions()))

    def scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        message = self.look_up("scatter", outputs[0].dtype, _nbytes(outputs[0]) * self._size)[2]
        return self._pass(
            message, lambda: self._inner.scatter(outputs, inputs, opts or dist.ScatterOptions())
        )

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        message = self.look_up("reduce", tensors[0].dtype, _nbytes(tensors[0]))[2]
        return self._pass(message, lambda: self._inner.reduce(tensors, opts or dist.ReduceOptions()))

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a block. Nothing is coalesced: each of its calls goes out by itself."""
        self._block = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """One Work for all calls since ``_start_coalescing``."""
        block, self._block = self._block or [], None
        return c.Joined(block, None)

    def shutdown(self) -> None:
        """Finish queued calls, end the worker threads and close the inner groups."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._close_inner()

    def abort(self) -> None:
        """Close the inner groups, so that calls under way fail, then end the worker threads."""
        self._close_inner()
        if self._endpoint is not None:
            self._endpoint.close()

    def _close_inner(self) -> None:
        self._inner.shutdown()
        if self._frames is not None:
            self._frames.shutdown()

    def _next_seed(self, kind: int) -> int:
        with self._calls_lock:
            self.calls[kind] += 1
            return derive_seed(self.options.seed, kind, int(self.calls[kind]))

    def submit(
        self, message: Message, call: Callable[[Metered], None], result: Any, queue: str = COLLECTIVES
    ) -> dist.Work:
        """Run a collective over the frames' transport on the worker of ``queue``, and count it as ``message``.

        For integrations that call the functions of :mod:`thinwire.collectives` themselves. The same order of
        calls on every rank. Raises PolicyError if the policy compresses nothing.
        """
        if self._endpoint is None:
            raise PolicyError(f"policy {self.policy.name} compresses nothing, so this group sends no frames")
        raw = raw_nbytes(message.op, message.nbytes, self._size)
        if self.options.inline and queue == COLLECTIVES:
            return self._tracked(self._endpoint.submit_inline(message, raw, call, result))
        return self._tracked(self._endpoint.submit(message, raw, call, result, queue))

    def _pass(self, message: Message, start: Callable[[], dist.Work]) -> dist.Work:
        """Hand a message to the inner group and count it; its time runs until the caller's wait returns."""
        if message.codec != PASS_THROUGH:
            message = dataclasses.replace(message, codec=PASS_THROUGH)
        raw = raw_nbytes(message.op, message.nbytes, self._size)
        sent = gloo_nbytes(message.op, message.nbytes, self._size) if self.options.backend == "gloo" else raw
        report = lambda s: self.traffic.add(message, raw, Tally(int(sent), wire_s=s))  # noqa: E731
        return self._tracked(Counted(start, report))

    def _all_pass(self, op: str, tensors: Sequence[Tensor]) -> bool:
        return all(self.look_up(op, x.dtype, _nbytes(x))[0] == NONE for x in tensors)

    def _tracked(self, work: dist.Work) -> dist.Work:
        if self._block is not None:
            self._block.append(work)
        return work


class _flat:
    """A contiguous flat view of a tensor to write into; a non-contiguous tensor gets the result on exit."""

    def __init__(self, x: Tensor) -> None:
        self._x = x.detach()
        self._flat = self._x.contiguous().view(-1)

    def __enter__(self) -> Tensor:
        return self._flat

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and not self._x.is_contiguous():
            self._x.copy_(self._flat.view_as(self._x))


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _sums(opts: Any) -> bool:
    """SUM and AVG are linear, so their terms may be encoded; MIN, MAX, PROD and bit operations pass through."""
    # ReduceOp compares with a member by ==, but not from the member's side, which "in" would do.
    return bool(opts.reduceOp == _SUM or opts.reduceOp == _AVG)


def _check_share(op: str, share: Tensor, whole: Tensor, size: int) -> None:
    if share.numel() * size != whole.numel():
        raise UnsupportedError(
            f"{op} among {size} ranks: {share.numel()} values per rank do not make {whole.numel()} in all"
        )


def _reduce(flat: Tensor, codec: Codec, transport: Metered, chunks: c.Chunks, options: CallOptions) -> Tensor:
    reduce = c.ring_reduce_scatter if options.algorithm == "ring" else c.reduce_scatter
    return reduce(flat, codec, transport, chunks, options)


def _split(flat: Tensor, like: Tensor, splits: Sequence[int], size: int) -> list[Tensor]:
    """Cut a flat tensor by splits along the first dimension of ``like``; no splits: equal parts."""
    if not splits:
        return equal_parts(flat, size)
    row = like.numel() // like.shape[0] if like.shape[0] else 0
    return list(torch.split(flat, [n * row for n in splits]))


def _as_allreduce(opts: Any) -> Any:
    plain = dist.AllreduceOptions()
    plain.reduceOp = opts.reduceOp
    return plain


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
