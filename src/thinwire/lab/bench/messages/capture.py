"""Real messages: the reference trainer runs under a policy whose codec sends every bit and keeps a copy.

So what is measured is what a codec would have been given, at the place where it would have been: chunks of gradient
buckets, partial sums of activations, differences of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ....codecs import NoneCodec
from ....integrate.gradients import local_tensor
from ....integrate.mesh import init_mesh
from ....launch import run_ranks
from ....policy import AxisPolicy, ByDtype, Policy
from ...train.config import TrainConfig
from ...train.layout import Layout
from ...train.trainer import Trainer

PHASES = ("start", "middle", "late")
"""Stages of training: the second step, half of the steps, the last one."""
VALUES = 1 << 20
"""At most this many values of a role are kept from each rank and phase."""
_REPORTING = (0, -1)  # ranks that hand over what they kept: a first and a last pipeline stage


@dataclass(frozen=True)
class Role:
    """What a message is: axis and role. Optimizer state and parameters are taken from the trainer."""

    axis: str
    what: str

    def __str__(self) -> str:
        return f"{self.axis} {self.what}"


@dataclass(frozen=True)
class Capture:
    """What one precision's runs gave. messages: (role, phase) -> flat values. gradients: phase -> {weight: gradient}."""

    precision: str
    steps: int
    messages: dict[tuple[Role, str], Tensor]
    gradients: dict[str, dict[str, Tensor]]


class _Recorder:
    """What a rank has kept. ``phase`` is None between phases: nothing is kept then."""

    def __init__(self) -> None:
        self.phase: str | None = None
        self._kept: dict[tuple[Role, str], list[Tensor]] = {}

    def keep(self, role: Role, x: Tensor) -> None:
        if self.phase is None:
            return
        parts = self._kept.setdefault((role, self.phase), [])
        room = VALUES - sum(part.numel() for part in parts)
        if room > 0 and x.numel():
            parts.append(x.detach().reshape(-1)[:room].clone())

    def messages(self) -> dict[tuple[Role, str], Tensor]:
        return {key: torch.cat(parts) for key, parts in self._kept.items()}


_RECORDER = _Recorder()


@dataclass(frozen=True)
class CaptureCodec(NoneCodec):
    """``none``, and a copy of what is encoded for this process's recorder."""

    axis: str = ""
    what: str = ""

    name: ClassVar[str] = "capture"

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> int:
        _RECORDER.keep(Role(self.axis, self.what), x)
        return super()._encode(x, out, seed)


def _policy() -> Policy:
    def keep(axis: str, what: str, *ops: str) -> dict[str, ByDtype]:
        codec = CaptureCodec(axis, what)
        return dict.fromkeys(ops, ByDtype(codec, codec, codec))

    def by_role(axis: str, op: str) -> AxisPolicy:
        roles = {role: keep(axis, role, op) for role in ("activation", "activation_gradient")}
        return AxisPolicy(roles=roles, min_nbytes=0)

    return Policy(
        "capture",
        {
            "dp": AxisPolicy(keep("dp", "gradient", "reduce_scatter", "all_reduce"), min_nbytes=0),
            "zero": AxisPolicy(
                keep("zero", "parameter_difference", "all_gather"), difference=True, min_nbytes=0
            ),
            "tp": by_role("tp", "all_reduce"),
            "pp": by_role("pp", "send"),
        },
    )


def capture(config: TrainConfig, cache: Path, *, timeout: float = 3600.0) -> Capture:
    """Train twice: with dp=2 tp=2 pp=2 for the messages, and in one process for whole gradients of whole weights.

    config: model, data, precision, steps, batch; its layout is not used. cache: folder for tokenized text.
    """
    parallel = replace(config, layout=Layout(dp=2, tp=2, pp=2), zero=1)
    ranks: list[Any] = run_ranks(_messages_of_rank, 8, parallel, cache, timeout=timeout)
    messages: dict[tuple[Role, str], list[Tensor]] = {}
    for rank in _REPORTING:
        for key, values in ranks[rank].items():
            messages.setdefault(key, []).append(values)
    single = replace(config, layout=Layout(), zero=0)
    gradients = run_ranks(_gradients_of_rank, 1, single, cache, timeout=timeout)[0]
    joined = {key: torch.cat(parts) for key, parts in sorted(messages.items(), key=lambda item: str(item[0]))}
    return Capture(config.precision, config.steps, joined, gradients)


def _phase_of(step: int, steps: int) -> str | None:
    """The phase in whose messages step number ``step`` (from 1) is, if any."""
    return {2: "start", steps // 2: "middle", steps: "late"}.get(step)


def _messages_of_rank(
    rank: int, world: int, config: TrainConfig, cache: Path, report: Any
) -> dict[tuple[Role, str], Tensor]:
    mesh = init_mesh(config.layout.mesh_sizes(), _policy(), seed=config.seed)
    trainer = Trainer(config, mesh, cache)
    for step in range(1, config.steps + 1):
        _RECORDER.phase = _phase_of(step, config.steps)
        trainer.step()
        if _RECORDER.phase is not None:
            for tensor in trainer.weights().values():
                _RECORDER.keep(Role("zero", "parameter"), local_tensor(tensor))
            for name, tensor in trainer.state().items():
                for key, what in (("exp_avg", "first_moment"), ("exp_avg_sq", "second_moment")):
                    if name.endswith(f".{key}"):
                        _RECORDER.keep(Role("state", what), tensor)
        _RECORDER.phase = None
    dist.barrier()
    return _RECORDER.messages() if rank in {r % world for r in _REPORTING} else {}


def _gradients_of_rank(
    rank: int, world: int, config: TrainConfig, cache: Path, report: Any
) -> dict[str, dict[str, Tensor]]:
    mesh = init_mesh(config.layout.mesh_sizes(), "none", seed=config.seed)
    trainer = Trainer(config, mesh, cache)
    found: dict[str, dict[str, Tensor]] = {}
    for step in range(1, config.steps + 1):
        trainer.step()
        phase = _phase_of(step, config.steps)
        if phase is not None:
            found[phase] = {n: g.clone() for n, g in trainer.gradients().items() if g.ndim == 2}
    return found
