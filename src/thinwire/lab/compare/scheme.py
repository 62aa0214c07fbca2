"""What takes part in a comparison: a policy, or PyTorch without thinwire."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.distributed.device_mesh import DeviceMesh

from ...errors import SpecError
from ...integrate.mesh import init_mesh
from ...integrate.sharding import Sharding, list_shardings
from ...policy import Policy
from ...presets import load
from ..train.config import TrainConfig
from ..train.mesh import build_mesh
from ..train.plain import Hook
from ..train.sharded import is_sharding, sharding_of
from ..wiring import Wiring

PLAIN = "plain"
_LANES = "@lanes="


@dataclass(frozen=True)
class Scheme:
    """policy: of thinwire groups; None: PyTorch's own, or a sharding scheme's. hook: PyTorch's way to send gradients, over
    either. lanes: of the groups; None: as many as they have by themselves.
    """

    name: str
    description: str
    policy: Policy | None
    hook: Hook | None = None
    lanes: int | None = None

    def sharding(self, config: TrainConfig, wiring: Wiring) -> Sharding | None:
        """How state is cut, if it is by degrees: the scheme's own, or those of the settings with its policy."""
        if self.hook is not None or (self.policy is None and not is_sharding(self.name)):
            return None
        spec = self.name if self.policy is None else self.policy
        return sharding_of(spec, config.degrees, config.layout, wiring.ranks_per_host)

    def policies(self, config: TrainConfig, wiring: Wiring) -> list[Policy]:
        """All policies that its messages go through. Raises LayoutError for degrees that do not fit the ranks."""
        cut = self.sharding(config, wiring)
        if cut is not None:
            return list(cut.policies())
        return [] if self.policy is None else [self.policy]

    def mesh(self, config: TrainConfig, wiring: Wiring) -> DeviceMesh:
        """The groups of a run."""
        if self.policy is None:
            return build_mesh(config.layout)
        return init_mesh(
            config.layout.mesh_sizes(),
            self.policy,
            seed=config.seed,
            backend=wiring.backend,
            options=wiring.options if self.lanes is None else replace(wiring.options, lanes=self.lanes),
        )


def scheme(spec: str) -> Scheme:
    """A policy's name or TOML file, or one of these:

    ``plain``: torch.distributed over gloo. ``plain:bf16``, ``plain:fp16``, ``plain:powersgd=4``: with a hook of PyTorch's
    (:mod:`thinwire.lab.train.plain`). ``none:bf16`` and so on: that hook over thinwire groups that compress nothing.
    ``zeropp``, ``zero3:bf16``: a sharding scheme, with a policy of its own or another (:mod:`thinwire.integrate.sharding`).
    A policy may say how many lanes its groups have: ``balanced@lanes=1``. Raises SpecError for what is none of them.
    """
    name, lanes, count = spec.rpartition(_LANES)
    if lanes:
        found = scheme(name)
        if found.policy is None or not count.isdecimal() or int(count) < 1:
            raise SpecError(f"{spec}: POLICY{_LANES}N with N lanes, 1 or more, of thinwire groups")
        description = f"{found.description}; {count} lane(s)"
        return replace(found, name=f"{found.name}{_LANES}{count}", description=description, lanes=int(count))
    base, _, hook = spec.partition(":")
    if base == PLAIN:
        words = "torch.distributed over gloo"
        return Scheme(
            spec, f"{words}, hook {hook}" if hook else words, None, Hook.parse(hook) if hook else None
        )
    if base == "none" and hook:
        return Scheme(
            spec, f"nothing is compressed but by PyTorch's hook {hook}", load("none"), Hook.parse(hook)
        )
    if is_sharding(base):
        if hook:
            load(hook)
        return Scheme(spec, list_shardings()[base], None)
    policy = load(spec)
    return Scheme(policy.name, policy.description, policy)
