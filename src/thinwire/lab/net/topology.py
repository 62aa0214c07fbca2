"""Which hosts an emulated network has, how many ranks each holds, and how fast its links are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...errors import LayoutError, SpecError, nearest
from .rate import parse_rate

_MAX_HOSTS = 250
_MAX_LATENCY_S = 1.0


@dataclass(frozen=True)
class Topology:
    """Hosts behind one switch, or behind one switch per group.

    hosts: number of hosts. ranks_per_host: the same for all, or one number per host; ranks are numbered
    contiguously, host by host. rate: of the link of every host, or one per host, in each direction (text, see
    ``parse_rate``). groups: hosts per group, contiguous; empty means one group. uplink: rate of the link of
    each group to the others, in each direction. latency_s: seconds added one way between any two hosts.
    Ranks of one host talk over its loopback, which is never shaped.

    Raises SpecError for a rate that does not parse and LayoutError for numbers that do not fit together.
    """

    hosts: int = 2
    ranks_per_host: int | tuple[int, ...] = 1
    rate: str | tuple[str, ...] = "unlimited"
    groups: tuple[int, ...] = ()
    uplink: str = "unlimited"
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= _MAX_HOSTS:
            raise LayoutError(f"{self.hosts} hosts: 1 to {_MAX_HOSTS} are possible")
        if isinstance(self.ranks_per_host, tuple) and len(self.ranks_per_host) != self.hosts:
            raise LayoutError(
                f"ranks_per_host {self.ranks_per_host} needs one number for each of {self.hosts} hosts"
            )
        if min(self.rank_counts) < 0 or self.world < 1:
            raise LayoutError(
                f"ranks_per_host {self.ranks_per_host}: none may be negative, one must be positive"
            )
        if isinstance(self.rate, tuple) and len(self.rate) != self.hosts:
            raise LayoutError(f"rate {self.rate} needs one rate for each of {self.hosts} hosts")
        if self.groups and (min(self.groups) < 1 or sum(self.groups) != self.hosts):
            raise LayoutError(f"groups {self.groups} must be positive and add up to {self.hosts} hosts")
        if not 0 <= self.latency_s <= _MAX_LATENCY_S:
            raise LayoutError(f"latency_s {self.latency_s}: 0 to {_MAX_LATENCY_S} seconds are possible")
        _ = self.link_bit_s
        if self.uplink_bit_s is not None and len(self.groups) < 2:
            raise LayoutError(f"uplink {self.uplink!r} needs two groups or more, groups is {self.groups}")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Topology:
        """From a TOML table with the field names as keys; lists stand for tuples. Raises SpecError on others."""
        known = {f.name for f in fields(cls)}
        for key in table:
            if key not in known:
                raise SpecError(f"unknown key {key!r} in the network table: {nearest(key, known)}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
        try:
            return cls(**values)
        except TypeError as e:
            raise SpecError(f"network table {dict(table)} has a value of the wrong type: {e}") from e

    @property
    def rank_counts(self) -> tuple[int, ...]:
        """Ranks on each host."""
        if isinstance(self.ranks_per_host, tuple):
            return self.ranks_per_host
        return (self.ranks_per_host,) * self.hosts

    @property
    def world(self) -> int:
        """Number of ranks."""
        return sum(self.rank_counts)

    @property
    def host_of_rank(self) -> tuple[int, ...]:
        """The host of each rank."""
        return tuple(host for host, count in enumerate(self.rank_counts) for _ in range(count))

    @property
    def group_of_host(self) -> tuple[int, ...]:
        """The group of each host; all 0 without groups."""
        groups = self.groups or (self.hosts,)
        return tuple(group for group, count in enumerate(groups) for _ in range(count))

    @property
    def link_bit_s(self) -> tuple[int | None, ...]:
        """Rate of each host's link in bit/s, None for no limit."""
        rates = self.rate if isinstance(self.rate, tuple) else (self.rate,) * self.hosts
        return tuple(parse_rate(rate) for rate in rates)

    @property
    def uplink_bit_s(self) -> int | None:
        """Rate of each group's uplink in bit/s, None for no limit."""
        return parse_rate(self.uplink)

    def path_bit_s(self, source: int, target: int) -> int | None:
        """Rate in bit/s of the slowest link between two hosts, None for no limit (one host: None)."""
        if source == target:
            return None
        rates = [self.link_bit_s[source], self.link_bit_s[target]]
        if self.group_of_host[source] != self.group_of_host[target]:
            rates.append(self.uplink_bit_s)
        return min((rate for rate in rates if rate is not None), default=None)

    def describe(self) -> dict[str, Any]:
        """The fields as plain values, for results."""
        return {
            "hosts": self.hosts,
            "ranks_per_host": list(self.rank_counts),
            "rate": list(self.rate) if isinstance(self.rate, tuple) else self.rate,
            "groups": list(self.groups),
            "uplink": self.uplink,
            "latency_s": self.latency_s,
        }
