"""Options of a thinwire group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from ..collectives.topology import Topology
from ..errors import PolicyError
from ..policy import Policy

DEFAULT_LANES = 2


@dataclass(frozen=True)
class GroupOptions:
    """What a thinwire group is told at construction; equal on all its ranks.

    policy: a Policy, a preset's name or a TOML file. axis: this group's axis; None: from the device mesh's
    dimension name. op_axes: another axis for some ops (FSDP gathers parameters, axis ``zero``, over the
    group that reduces gradients, axis ``dp``). op_roles: the role of an op's messages, where it is known.
    axis_names: mesh dimension name -> axis, for meshes with other names. feedback_by_caller: who made
    this group runs error feedback itself, so a policy that asks for it is accepted. roles_by_caller: who uses
    this group marks its messages (:meth:`ThinwireGroup.role`, :mod:`thinwire.integrate.roles`), so a policy that
    names roles is accepted; a message without one is then an error where the policy needs it. inline: run compressed
    collectives in the caller's thread, for axes whose callers wait at once (tensor parallelism); saves two
    changes of thread a call, overlaps nothing. lanes: compressed collectives that are under way at once, each lane with
    connections of its own to all other ranks; None: see :meth:`lane_count`. backend: the inner group's: gloo, nccl,
    ``cpu:gloo,cuda:nccl``, or mpi (:mod:`thinwire.mpi`).
    hosts: which ranks share a host, where a policy asks for it (algorithm ``hierarchical`` or ``auto``): a TOML file
    (:func:`~thinwire.collectives.topology.from_toml`), compared with what the ranks find themselves, or a Topology of the
    default group's ranks, taken as it is; None: what the ranks find. host: what this rank finds, where it finds wrong; the
    one option that ranks need not have alike.
    checksum: frames carry a CRC-32 of their payload, too, for links that are not trusted. compare_calls: the ranks
    compare every compressed collective before it starts, not only the first of a kind: one small all-gather more a
    call, by which ranks that call in another order are told so (without, gloo may end a process).
    """

    policy: Policy | str = "none"
    axis: str | None = None
    op_axes: Mapping[str, str] = field(default_factory=dict)
    op_roles: Mapping[str, str] = field(default_factory=dict)
    axis_names: Mapping[str, str] = field(default_factory=dict)
    feedback_by_caller: bool = False
    roles_by_caller: bool = False
    inline: bool = False
    lanes: int | None = None
    backend: str = "gloo"
    hosts: str | Topology | None = None
    host: str | None = None
    checksum: bool = False
    compare_calls: bool = False
    seed: int = 0
    timeout: timedelta = timedelta(minutes=30)

    def __post_init__(self) -> None:
        lanes = self.lanes
        if lanes is None:
            return
        if not isinstance(lanes, int) or isinstance(lanes, bool) or lanes < 1:
            raise PolicyError(f"lanes = {lanes!r}: a number of lanes, 1 or more, is needed")
        if self.inline and lanes > 1:
            raise PolicyError(
                f"lanes = {lanes} with inline: the caller's thread is one lane; leave one of them out"
            )

    def lane_count(self) -> int:
        """The lanes of a group of several ranks: as many as are given; else one if inline or over nccl, two over gloo."""
        # NCCL's groups may wait for each other on one device.
        default = 1 if self.inline or self.backend != "gloo" else DEFAULT_LANES
        return self.lanes if self.lanes is not None else default

    @property
    def _timeout(self) -> timedelta:  # DeviceMesh reads it from any backend's options
        return self.timeout

    def text(self) -> str:
        """What the ranks of a group must give alike, beside the policy."""
        maps = (sorted(m.items()) for m in (self.op_axes, self.op_roles, self.axis_names))
        checks = f"lanes {self.lane_count()}, checksum {self.checksum}, compare_calls {self.compare_calls}"
        return f"axis {self.axis}, maps {list(maps)}, backend {self.backend}, {checks}, seed {self.seed}"
