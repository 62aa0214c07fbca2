"""What every message of a thinwire group passes: identity, policy, roles, workers, counters.

Several inner groups, because gloo and NCCL match collectives by the order of the calls: one for what passes
through in the caller's order, one for the frames of each lane in its worker's order.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ..codecs import Codec, Compressor
from ..collectives.endpoint import COLLECTIVES
from ..collectives.lanes import Lanes
from ..collectives.options import CallOptions, derive_seed
from ..collectives.topology import Topology
from ..collectives.traffic import PASS_THROUGH, Message, Tally, Traffic, gloo_nbytes, raw_nbytes
from ..collectives.transport import Metered
from ..errors import MismatchError, PeerError, PolicyError, nearest
from ..inner import Counted, agree, disconnect, inner_devices, make_inner_group, meet, transport_of
from ..policy import AXES, NONE, ROLES, AxisPolicy
from ..presets import load
from ..wire import VERSION
from .hosts import find_topology
from .options import GroupOptions
from .roll_call import RollCall
from .statistics import LIVE
from .tensors import nbytes_of

BACKEND = "thinwire"
_ROLL_CALL = timedelta(seconds=5)
_ONE_VALUE = 8  # bytes; the time of such messages is not counted
ROLE_TAGS = {0x74770001: "activation", 0x74770002: "activation_gradient"}
"""Tags of point-to-point messages that say a role: a pipeline sends both kinds to the same neighbour."""


class GroupBase(dist.ProcessGroup):
    """A ``torch.distributed`` group without its operations."""

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
        self._told = threading.local()  # the role that a thread has given
        self._block: list[dist.Work] | None = None  # the calls of a coalescing block
        if options.axis is not None:
            self._check_policy()
        agree(store, rank, size, f"wire format {VERSION}, {options.text()}, policy {self.policy}", timeout)
        self.topology: Topology | None = None
        by_level = {axis: p for axis, p in self.policy.axes.items() if p.by_level}
        if by_level:
            self.topology = find_topology(store, rank, size, options, timeout)
            self._check_levels(by_level, self.topology)
        self._roll_call = RollCall(store, rank, size)
        devices = inner_devices(options.backend)
        self._inner = self.make_inner(PrefixStore("pass", store), timeout)
        self._frames: list[dist.ProcessGroup] = []
        self._lanes: Lanes | None = None
        if any(p.compresses for p in self.policy.axes.values()):
            count = options.lane_count() if size > 1 else 1
            self._frames = [self.make_inner(PrefixStore(f"frames{i}", store), timeout) for i in range(count)]
            self._lanes = Lanes(
                [transport_of(frames) for frames in self._frames],
                self.traffic,
                device=devices[0],
                checksum=options.checksum,
                compare_calls=options.compare_calls,
                after_failure=self._after_failure,
                monitors={axis: p.monitor for axis, p in self.policy.axes.items() if p.monitor is not None},
            )
        # What is not overridden here falls through to the inner group's backend; MPI's group has none below it.
        for device in devices if options.backend != "mpi" else ():
            self._register_backend(
                device, dist.ProcessGroup.BackendType.CUSTOM, self._inner._get_backend(device)
            )
        meet(store, rank, size, timeout)
        LIVE.add(self)

    def make_inner(self, store: Store, timeout: timedelta) -> dist.ProcessGroup:
        """A real group of the backend that carries the bytes; a subclass may put something around it."""
        return make_inner_group(store, self._rank, self._size, self.options.backend, timeout)

    def _after_failure(self, call: str, error: Exception) -> str:
        """A call has failed here: let it fail on all ranks, and say what they know of it.

        Without that a rank that waits for one that has given up would wait until its own time is up.
        """
        if isinstance(error, MismatchError):
            # All ranks raise it; what is under way on other lanes must not wait for ranks that have given up.
            if len(self._frames) > 1:
                disconnect(*self._frames)
            return ""
        disconnect(self._inner, *self._frames)
        if isinstance(error, PeerError):
            return "\n" + self._roll_call.account(call, self.axis())
        self._roll_call.report(f"{call}: {type(error).__name__}: {error}")
        return ""

    def _lost(self, message: Message, error: RuntimeError) -> PeerError:
        """What to raise for the inner group's error in a call that passes through."""
        lost = PeerError(f"{self.options.backend} failed: {error}")
        return PeerError(f"rank {self._rank}: {message}: {lost}{self._after_failure(str(message), lost)}")

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
            shaped = [c for choice in policy.choices() for c in choice.codecs() if not isinstance(c, Codec)]
            if shaped and not self.options.feedback_by_caller:
                raise PolicyError(
                    f"policy {self.policy.name}, axis {axis}: {shaped[0]} needs the shapes of parameters, which a bare "
                    "group does not see; use thinwire.GradientSync, thinwire.compress_ddp for DistributedDataParallel, or "
                    "a codec"
                )
            if policy.feedback and not self.options.feedback_by_caller:
                raise PolicyError(
                    f"policy {self.policy.name}, axis {axis}: error feedback needs to know the parameters, which a "
                    "bare group does not see; use thinwire.GradientSync, thinwire.compress_ddp for "
                    "DistributedDataParallel, thinwire.compress_fsdp for FSDP2, or a policy with feedback = false"
                )
            if policy.difference and not self.options.feedback_by_caller:
                raise PolicyError(
                    f"policy {self.policy.name}, axis {axis}: differences need the value that was sent last, which a "
                    "bare group does not keep; use thinwire.GradientSync, or a policy with difference = false"
                )
            unseen = set(policy.roles) - set(self.options.op_roles.values())
            if unseen and not self.options.roles_by_caller:
                raise PolicyError(
                    f"policy {self.policy.name}, axis {axis}: names the role(s) {sorted(unseen)}, which a bare "
                    "group does not see; give GroupOptions.op_roles, or put the codec on the op"
                )

    def _check_levels(self, axes: Mapping[str, AxisPolicy], topology: Topology) -> None:
        for axis, policy in axes.items():
            try:
                policy.check_levels(topology)
            except PolicyError as e:
                raise PolicyError(f"policy {self.policy.name}, axis {axis}: {e}") from None

    @contextmanager
    def role(self, role: str) -> Iterator[None]:
        """Inside, the messages of this thread are of this role. For integrations, which know what they send."""
        if role not in ROLES:
            raise PolicyError(f"unknown role {role!r}; {nearest(role, ROLES)}")
        before = getattr(self._told, "role", None)
        self._told.role = role
        try:
            yield
        finally:
            self._told.role = before

    def reduce_by(self, x: Tensor, reduction: Callable[[Any], dist.Work]) -> None:
        """This thread's next all-reduce, if it is of ``x`` itself, is ``reduction(op)``.

        For integrations that know what a message is while somebody else makes the call (FSDP2, between replicas).
        """
        self._told.reduction = x, reduction

    def _reduction_of(self, x: Tensor) -> Callable[[Any], dist.Work] | None:
        told = getattr(self._told, "reduction", None)
        if told is None:
            return None
        self._told.reduction = None
        expected, reduction = told
        return reduction if expected is x else None

    def look_up(
        self, op: str, dtype: torch.dtype, nbytes: int, *, any_size: bool = False, role: str | None = None
    ) -> tuple[Codec, AxisPolicy, Message]:
        """What the policy says of a message of ``nbytes`` (see :func:`raw_nbytes`): ``none`` means pass through.

        any_size: small messages too, for calls whose sizes the ranks do not see alike. role: where the message
        itself tells it; else it is what :meth:`role` was given, else what the options say of the op. Raises
        PolicyError if the policy asks for the role of a message that has none.
        """
        role = role or getattr(self._told, "role", None) or self.options.op_roles.get(op, "unknown")
        key = op, dtype, nbytes, any_size, role
        found = self._known.get(key)
        if found is None:
            codec, policy, message = self._look_up(*key)
            if not isinstance(codec, Codec):
                raise PolicyError(
                    f"policy {self.policy.name}, axis {message.axis}: {codec} needs the shapes of parameters, which {op} of "
                    f"{nbytes} bytes does not tell; gradients go through thinwire.GradientSync or thinwire.compress_ddp, "
                    "other messages over a group of another policy"
                )
            found = self._known[key] = codec, policy, message
        return found

    def look_up_gradient(
        self, op: str, dtype: torch.dtype, nbytes: int
    ) -> tuple[Compressor, AxisPolicy, Message]:
        """What the policy says of a gradient, for integrations that know the parameters: a codec or another compressor."""
        return self._look_up(op, dtype, nbytes, False, "gradient")

    def _look_up(
        self, op: str, dtype: torch.dtype, nbytes: int, any_size: bool, role: str
    ) -> tuple[Compressor, AxisPolicy, Message]:
        axis = self.axis(op)
        policy = self.policy.axis(axis)
        judged = max(nbytes, policy.min_nbytes) if any_size else nbytes
        if role == "unknown" and policy.needs_role(op, dtype, judged):
            raise PolicyError(
                f"policy {self.policy.name}, axis {axis}: has codecs for {op} by role ({', '.join(policy.roles)}), and this "
                "message has none; send it through thinwire.integrate.tensor or thinwire.integrate.pipeline, or inside "
                "ThinwireGroup.role(...)"
            )
        codec = policy.codec(op, role, dtype, judged, self.topology) if self._lanes is not None else NONE
        name = PASS_THROUGH if codec == NONE else str(codec)
        return codec, policy, Message(axis, op, role, name, str(dtype).removeprefix("torch."), nbytes)

    def codec_states(self) -> bytes:
        """What this rank's stateful codecs (codebooks) and error monitors remember; no calls may be under way.

        For a checkpoint. Without it codecs begin anew: the values stay the same, the first messages are larger; and so do
        monitors: what travelled as it was since it had passed its limit is encoded again until it does so anew.
        """
        return self._lanes.dump_states() if self._lanes is not None else b"{}"

    def load_codec_states(self, states: bytes) -> None:
        """Go on from :meth:`codec_states`, before the first call: on every rank of the group, or on none.

        Raises CheckpointError, and changes nothing, if they cannot be those, or if codecs had states in a group with another
        number of lanes.
        """
        if self._lanes is not None:
            self._lanes.load_states(states)

    def call_options(
        self, policy: AxisPolicy, message: Message, *, mean: bool = False, seed: int | None = None
    ) -> CallOptions:
        """Options of the next call, whose message and policy were looked up.

        seed: the same on all ranks; None: one of the group's own, different for each call.
        """
        return CallOptions(
            mean=mean,
            seed=self._next_seed(0) if seed is None else seed,
            algorithm=policy.algorithm,
            topology=self.topology,
            levels=policy.level_codecs(message.op, getattr(torch, message.dtype)) if policy.levels else (),
        )

    def shutdown(self) -> None:
        """Finish queued calls, end the worker threads and close the inner groups."""
        LIVE.discard(self)
        if self._lanes is not None:
            self._lanes.close()
        self._close_inner()

    def abort(self) -> None:
        """Close the connections, so that calls under way fail on all ranks, then end the worker threads."""
        LIVE.discard(self)
        disconnect(self._inner, *self._frames)
        self._close_inner()
        if self._lanes is not None:
            self._lanes.close()

    def _close_inner(self) -> None:
        for group in (self._inner, *self._frames):
            group.shutdown()

    def _next_seed(self, kind: int) -> int:
        with self._calls_lock:
            self.calls[kind] += 1
            return derive_seed(self.options.seed, kind, int(self.calls[kind]))

    def submit(
        self,
        message: Message,
        call: Callable[[Metered], None],
        result: Any,
        queue: str = COLLECTIVES,
        lane: int | None = None,
    ) -> dist.Work:
        """Run a collective over the frames' transport on the worker of ``queue``, and count it as ``message``.

        For integrations that call the functions of :mod:`thinwire.collectives` themselves. The same order of
        calls on every rank. lane: calls with numbers that differ by less than the number of lanes run side by side; the same
        on every rank; None: after the last such call's. Raises PolicyError if the policy compresses nothing.
        """
        if self._lanes is None:
            raise PolicyError(f"policy {self.policy.name} compresses nothing, so this group sends no frames")
        raw = raw_nbytes(message.op, message.nbytes, self._size)
        if self.options.inline and queue == COLLECTIVES:
            return self._tracked(self._lanes.submit_inline(message, raw, call, result))
        return self._tracked(self._lanes.submit(message, raw, call, result, queue, lane))

    def _pass(self, message: Message, start: Callable[[], dist.Work]) -> dist.Work:
        """Hand a message to the inner group and count it; its time runs until the caller's wait returns."""
        if message.codec != PASS_THROUGH:
            message = dataclasses.replace(message, codec=PASS_THROUGH)
        raw = raw_nbytes(message.op, message.nbytes, self._size)
        sent = gloo_nbytes(message.op, message.nbytes, self._size) if self.options.backend == "gloo" else raw
        if message.nbytes <= _ONE_VALUE:
            # DDP's join drops the Python half of such a Work and asks the other for its result: it gets the inner one.
            work = start()
            self.traffic.add(message, raw, Tally(int(sent)))
            return self._tracked(work)
        # The report must not hold the group: the inner group's thread, which drops it, would join itself at the end.
        traffic = self.traffic
        report = lambda s: traffic.add(message, raw, Tally(int(sent), wire_s=s))  # noqa: E731
        return self._tracked(self._watched(message, start, report))

    def _watched(
        self, message: Message, start: Callable[[], dist.Work], report: Callable[[float], None]
    ) -> Counted:
        """The inner group's Work whose errors name the call and the ranks."""
        lost = WeakMethod(self._lost)  # as above: the group must not be held

        def explain(error: RuntimeError) -> Exception:
            method = lost()
            return error if method is None else method(message, error)

        return Counted(start, report, explain)

    def _all_pass(self, op: str, tensors: Sequence[Tensor]) -> bool:
        return all(self.look_up(op, x.dtype, nbytes_of(x))[0] == NONE for x in tensors)

    def _tracked(self, work: dist.Work) -> dist.Work:
        if self._block is not None:
            self._block.append(work)
        return work
