"""Which ranks of a group share a host: found by the ranks themselves, or told by a file that is compared with it.

Ranks of one host have a kernel and its network alike; containers that have a network each are hosts of their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ..collectives.topology import Topology, from_toml
from ..errors import LayoutError, MismatchError, ThinwireError
from ..inner import gathered
from ..machine import network
from .options import GroupOptions


def find_topology(store: Store, rank: int, size: int, options: GroupOptions, timeout: timedelta) -> Topology:
    """The topology of a group that is being made: on all of its ranks, or an error on all of them.

    Raises LayoutError for a hosts file that cannot be read or does not fit what the ranks found, by rank; MismatchError
    if the ranks were given different ones; PeerError if some do not come.
    """
    initialized = dist.is_initialized()
    number = dist.get_rank() if initialized else rank  # of the ranks that a file speaks of
    told = error = ""
    given: Topology | None = None
    try:
        given = _given(options, dist.get_world_size() if initialized else size)
        told = str(given)
    except ThinwireError as e:
        error = str(e)
    mine = json.dumps([number, options.host or network(), told, error])
    every = [json.loads(text) for text in gathered(store, "host", rank, size, mine, timeout)]
    numbers, hosts, texts, errors = zip(*every, strict=True)
    if any(errors):
        raise LayoutError("\n".join(f"rank {r}: {e}" for r, e in zip(numbers, errors, strict=True) if e))
    if len(set(texts)) > 1:
        lines = "\n".join(f"  rank {r}: {t or 'none'}" for r, t in zip(numbers, texts, strict=True))
        raise MismatchError(f"the ranks of a group were given different hosts:\n{lines}")
    if given is None:
        return Topology.of_hosts(hosts)
    topology = given.of(numbers)
    if not isinstance(options.hosts, Topology):
        _compare(topology, numbers, hosts, str(options.hosts))
    return topology


def _given(options: GroupOptions, world: int) -> Topology | None:
    hosts = options.hosts
    if hosts is None:
        return None
    if isinstance(hosts, Topology):
        if hosts.size != world:
            raise LayoutError(f"hosts: a topology of {hosts.size} ranks in a world of {world}")
        return hosts
    return from_toml(Path(hosts), world)


def _compare(topology: Topology, numbers: Sequence[int], hosts: Sequence[str], file: str) -> None:
    for later in range(len(hosts)):
        for earlier in range(later):
            found = hosts[earlier] == hosts[later]
            said = topology.places[earlier] == topology.places[later]
            if found != said:
                a, b = numbers[earlier], numbers[later]
                where = "share a host" if said else "are on two hosts"
                raise LayoutError(
                    f"hosts file {file}: ranks {a} and {b} {where}, but rank {a} found itself on {hosts[earlier]} and "
                    f"rank {b} on {hosts[later]}; mend the file, or give GroupOptions(host=...) where a rank's own "
                    "finding is wrong"
                )
