"""What takes part in a comparison: a policy, or PyTorch without thinwire."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from ...integrate.mesh import init_mesh
from ...policy import Policy
from ...presets import load
from ..train.config import TrainConfig
from ..train.mesh import build_mesh
from ..train.plain import Hook
from ..wiring import Wiring

PLAIN = "plain"


@dataclass(frozen=True)
class Scheme:
    """policy: of thinwire groups; None: PyTorch's own. hook: PyTorch's way to send gradients, over either."""

    name: str
    description: str
    policy: Policy | None
    hook: Hook | None = None

    def mesh(self, config: TrainConfig, wiring: Wiring) -> DeviceMesh:
        """The groups of a run."""
        if self.policy is None:
            return build_mesh(config.layout)
        return init_mesh(
            config.layout.mesh_sizes(),
            self.policy,
            seed=config.seed,
            backend=wiring.backend,
            options=wiring.options,
        )


def scheme(spec: str) -> Scheme:
    """A policy's name or TOML file, or one of these:

    ``plain``: torch.distributed over gloo. ``plain:bf16``, ``plain:fp16``, ``plain:powersgd=4``: with a hook of PyTorch's
    (:mod:`thinwire.lab.train.plain`). ``none:bf16`` and so on: that hook over thinwire groups that compress nothing.
    Raises SpecError for what is none of them.
    """
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
    policy = load(spec)
    return Scheme(policy.name, policy.description, policy)
