"""Sharding schemes by name: degrees, a policy between hosts and one inside of them. Nothing else sets them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import LayoutError, SpecError, nearest
from ..policy import Policy, from_dict
from ..presets import load
from .degrees import ShardingDegrees


@dataclass(frozen=True)
class Sharding:
    """A scheme. policy: of messages between hosts. inside: of those that stay on a host."""

    degrees: ShardingDegrees
    policy: Policy
    inside: Policy
    name: str = "sharding"
    description: str = ""

    @classmethod
    def of(
        cls,
        degrees: ShardingDegrees | Mapping[str, Any],
        policy: Policy | str,
        inside: Policy | str | None = None,
    ) -> Sharding:
        """A scheme of your own. degrees: or a table as in TOML. policy: also a preset's name or a TOML file's path.

        inside: None: the same as ``policy``.
        """
        found = degrees if isinstance(degrees, ShardingDegrees) else ShardingDegrees.from_table(degrees)
        loaded = load(policy)
        within = loaded if inside is None else load(inside)
        return cls(found, loaded, within, f"{loaded.name}({found})", loaded.description)

    def policies(self) -> tuple[Policy, Policy]:
        """Both."""
        return self.policy, self.inside


# A message of 16 KiB is on the wire about as long as the extra change of threads takes: smaller ones go as they are.
_SMALL = {"min_nbytes": 16 << 10}
_ZEROPP: Mapping[str, Any] = {
    "zero": {"gather": "int8:block=128", **_SMALL},
    "dp": {"reduce": "int4:block=128", **_SMALL},
}
_SDP4: Mapping[str, Any] = {
    "zero": {"gather": "int4:block=128", "difference": True, **_SMALL},
    "dp": {"reduce": "hadamard:block=128|int4:block=128", **_SMALL},
}
_SDP4_INSIDE: Mapping[str, Any] = {"dp": {"reduce": "hadamard:block=128|int8:block=128", **_SMALL}}

_WORLD, _HOST = "world", "host"
_PLAIN: Mapping[str, Any] = {}
_PRESETS: dict[str, tuple[dict[str, int | str], Mapping[str, Any], Mapping[str, Any], str]] = {
    # name: (degrees, policy's axes between hosts, inside, what it is)
    "zero1": ({"optim": _WORLD}, _PLAIN, _PLAIN, "optimizer state cut over all ranks"),
    "zero2": ({"grads": _WORLD, "optim": _WORLD}, _PLAIN, _PLAIN, "gradients, too"),
    "zero3": (
        {"params": _WORLD, "grads": _WORLD, "optim": _WORLD},
        _PLAIN,
        _PLAIN,
        "parameters, too",
    ),
    "hsdp": (
        {"params": _HOST, "grads": _HOST, "optim": _HOST},
        _PLAIN,
        _PLAIN,
        "everything cut over a host, and replicated between hosts",
    ),
    "frontier": (
        {"params": 2, "grads": 8, "optim": _WORLD},
        _PLAIN,
        _PLAIN,
        "parameters cut over 2 ranks, gradients over 8, optimizer state over all",
    ),
    "zeropp": (
        {"params": _WORLD, "grads": _WORLD, "optim": _WORLD, "secondary": _HOST},
        _ZEROPP,
        _PLAIN,
        "ZeRO++: ZeRO-3 with int8 parameters, a copy of them on each host for the backward pass, int4 gradients in two hops",
    ),
    "sdp4": (
        {"params": _HOST, "grads": _WORLD, "optim": _WORLD},
        _SDP4,
        _SDP4_INSIDE,
        "SDP4Bit: int4 differences of parameters, rotated gradients in int8 inside hosts and int4 between them",
    ),
}


def list_shardings() -> dict[str, str]:
    """Name and one line of description of every named scheme."""
    return {name: text for name, (*_, text) in _PRESETS.items()}


def sharding(spec: str, world: int, ranks_per_host: int | None = None) -> Sharding:
    """The scheme ``NAME``, or ``NAME:POLICY`` with another policy everywhere, for instance ``zero3:bf16``.

    world: number of ranks. ranks_per_host: None: all of them. Raises SpecError for an unknown name (the nearest are
    offered), LayoutError for ranks that its degrees do not fit.
    """
    name, colon, policy = spec.partition(":")
    if name not in _PRESETS:
        raise SpecError(f"unknown sharding scheme {spec!r}; {nearest(name, _PRESETS)}")
    places, between, inside, text = _PRESETS[name]
    host = world if ranks_per_host is None else ranks_per_host
    known = {_WORLD: world, _HOST: host}
    degrees = ShardingDegrees(
        **{key: known[place] if isinstance(place, str) else place for key, place in places.items()}
    )
    try:
        degrees.check(world, host)
    except LayoutError as e:
        raise LayoutError(f"sharding scheme {name} on {world} ranks, {host} on each host: {e}") from None
    if colon:
        return replace(Sharding.of(degrees, policy), name=spec, description=text)
    made = [from_dict({"axis": axes, "description": text}, name) for axes in (between, inside)]
    return Sharding(degrees, made[0], made[1], name, text)
