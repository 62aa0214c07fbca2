"""Which ranks of a group share a host, a rack, a site: levels, and the way of every rank's values through them.

A *unit* of a level is what lies below it: the whole group for the outermost one, a host for the innermost one; its
*children* are the units of the next level, in the end ranks. In a unit each rank d of the group has a *steward*: d itself
where the unit holds it, else a rank of the unit, chosen by d's position in its own units, so that the work is spread
whatever the number of ranks of each. What is sent to d climbs from steward to steward: over each link between units it
goes once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from .. import toml_tables
from ..errors import LayoutError, SpecError
from ..toml_tables import check_keys

INTER, INTRA = "inter", "intra"


@dataclass(frozen=True)
class Step:
    """What one rank does on one level when values climb to the rank that they are for; backwards when they come down.

    gives: (to, d): this rank passes on what it holds for d, sorted. takes: (d, sources): it becomes the holder of d,
    from these ranks (itself among them where it is one), in the order of the unit's children.
    """

    level: str
    gives: tuple[tuple[int, int], ...]
    takes: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Topology:
    """Where the ranks of a group are. The same on all of them.

    places: for each rank the names of its units, outermost first: ``("host-a",)``, or ``("rack-1", "host-a")``. levels:
    names of the levels, outermost first, one more than a place has names: the last one is between ranks of a host.

    Raises LayoutError for places that do not nest: of different depth, or a host in two racks.
    """

    places: tuple[tuple[str, ...], ...]
    levels: tuple[str, ...] = (INTER, INTRA)

    def __post_init__(self) -> None:
        if not self.places or len(set(self.levels)) != len(self.levels) or len(self.levels) < 2:
            raise LayoutError(
                f"levels {self.levels} of {len(self.places)} ranks: two names or more, no two alike"
            )
        above: dict[tuple[int, str], tuple[int, tuple[str, ...]]] = {}
        for rank, place in enumerate(self.places):
            if len(place) != len(self.levels) - 1:
                raise LayoutError(
                    f"rank {rank} is at {place}: levels {', '.join(self.levels)} need {len(self.levels) - 1} name(s)"
                )
            for depth, name in enumerate(place):
                first, where = above.setdefault((depth, name), (rank, place[:depth]))
                if where != place[:depth]:
                    raise LayoutError(
                        f"levels do not nest: {name} of rank {first} is in {'/'.join(where)}, that of rank {rank} in "
                        f"{'/'.join(place[:depth])}; a unit lies in one other"
                    )

    @staticmethod
    def of_hosts(hosts: Sequence[str]) -> Topology:
        """Two levels, from the name of each rank's host."""
        return Topology(tuple((host,) for host in hosts))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.places)

    @property
    def outermost(self) -> str:
        """The outermost level that has anything to send."""
        return self._busy[0] if self._busy else self.levels[0]

    @property
    def layered(self) -> bool:
        """Whether there is more than one level to send on: else a hierarchical collective is a flat one."""
        return len(self._busy) > 1

    def of(self, ranks: Sequence[int]) -> Topology:
        """That of a sub-group of these ranks, in its order."""
        return Topology(tuple(self.places[rank] for rank in ranks), self.levels)

    def level_between(self, a: int, b: int) -> str:
        """The level on which two ranks are apart; the innermost of a rank and itself."""
        for level, one, other in zip(self.levels, self.places[a], self.places[b], strict=False):
            if one != other:
                return level
        return self.levels[-1]

    def steps(self, rank: int) -> tuple[Step, ...]:
        """What ``rank`` does, innermost level first; levels on which nobody has anything to do are left out."""
        return _steps(self, rank)

    def steward(self, depth: int, like: int, d: int) -> int:
        """The steward of d in the unit that holds rank ``like`` at this depth (0: the whole group, last: the rank)."""
        unit = self._path(like)[:depth]
        own = self._path(d)
        for at in range(depth, len(self.levels)):
            children = self._children[unit]
            position = self._children[own[:at]].index(own[: at + 1])
            unit = children[position % len(children)]
        return self._rank_of[unit]

    def __str__(self) -> str:
        units = " ".join("/".join(place) for place in self.places)
        return f"levels {', '.join(self.levels)}: {units}"

    def _path(self, rank: int) -> tuple[str, ...]:
        return (*self.places[rank], str(rank))

    @cached_property
    def _children(self) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
        """Unit -> its children, in the order of their first ranks."""
        found: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for rank in range(self.size):
            path = self._path(rank)
            for depth in range(len(path)):
                children = found.setdefault(path[:depth], [])
                if path[: depth + 1] not in children:
                    children.append(path[: depth + 1])
        return found

    @cached_property
    def _rank_of(self) -> dict[tuple[str, ...], int]:
        return {self._path(rank): rank for rank in range(self.size)}

    @cached_property
    def _busy(self) -> tuple[str, ...]:
        """Levels with a unit of several children."""
        several = {len(unit) for unit, children in self._children.items() if len(children) > 1}
        return tuple(level for depth, level in enumerate(self.levels) if depth in several)


@lru_cache(maxsize=256)
def _steps(topology: Topology, rank: int) -> tuple[Step, ...]:
    steps, everyone = [], range(topology.size)
    for depth in reversed(range(len(topology.levels))):
        level = topology.levels[depth]
        if level not in topology._busy:
            continue
        unit = topology._path(rank)[:depth]
        # A rank of each child: their units at the next depth are the children.
        children = [
            next(r for r in everyone if topology._path(r)[: depth + 1] == child)
            for child in topology._children[unit]
        ]
        gives, takes = [], []
        for d in everyone:
            holder = topology.steward(depth, rank, d)
            if holder == rank:
                takes.append((d, tuple(topology.steward(depth + 1, child, d) for child in children)))
            elif topology.steward(depth + 1, rank, d) == rank:
                gives.append((holder, d))
        steps.append(Step(level, tuple(sorted(gives)), tuple(takes)))
    return tuple(steps)


def from_toml(path: Path, size: int) -> Topology:
    """Read the places of ``size`` ranks from a file::

        levels = ["rack", "inter", "intra"]   # outermost first; without it: inter, intra
        [host.a]
        ranks = [0, 1]
        within = ["rack-1"]                   # as many names as there are levels above inter
        [host.b]
        ranks = [2, 3, 4]
        within = ["rack-2"]

    Raises SpecError for a file that is not one of these, LayoutError for ranks that are missing or named twice, and for
    levels that do not nest.
    """
    table = toml_tables.read(path, "topology file")
    try:
        return from_dict(table, size)
    except (SpecError, LayoutError) as e:
        raise type(e)(f"topology file {path}: {e}") from None


def from_dict(table: Mapping[str, Any], size: int) -> Topology:
    """As :func:`from_toml`, from its tables."""
    check_keys(table, ("levels", "host"), "topology")
    levels = table.get("levels", [INTER, INTRA])
    if not isinstance(levels, list) or not all(isinstance(name, str) for name in levels):
        raise SpecError(f"levels: a list of names is needed, found {levels!r}")
    hosts = table.get("host", {})
    if not isinstance(hosts, Mapping):
        raise SpecError(f"host: tables [host.NAME] are needed, found {hosts!r}")
    places: dict[int, tuple[str, ...]] = {}
    for name, entry in hosts.items():
        check_keys(entry, ("ranks", "within"), f"host.{name}")
        ranks, within = entry.get("ranks", []), entry.get("within", [])
        if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            raise SpecError(f"host.{name}.ranks: a list of ranks is needed, found {ranks!r}")
        if not isinstance(within, list) or not all(isinstance(unit, str) for unit in within):
            raise SpecError(f"host.{name}.within: a list of names is needed, found {within!r}")
        for rank in ranks:
            if rank in places:
                raise LayoutError(f"rank {rank} is on host {places[rank][-1]} and on host {name}")
            places[rank] = (*within, name)
    missing = [rank for rank in range(size) if rank not in places]
    beyond = [rank for rank in places if not 0 <= rank < size]
    if missing or beyond:
        wrong = [f"ranks {missing} are on no host"] if missing else []
        wrong += [f"ranks {sorted(beyond)} do not exist"] if beyond else []
        raise LayoutError(f"{size} ranks, {len(places)} in [host.*]: {'; '.join(wrong)}")
    return Topology(tuple(places[rank] for rank in range(size)), tuple(levels))
