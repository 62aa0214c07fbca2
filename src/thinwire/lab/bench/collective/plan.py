"""What a run of the benchmark does: contenders, ops, sizes, repeats. Checked before any process is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....codecs import Codec
from ....collectives.options import Algorithm
from ....errors import UnsupportedError
from ....policy import NONE, OPS, AxisPolicy, ByDtype, Policy
from ....presets import load
from ...dtypes import DTYPES


@dataclass(frozen=True)
class Contender:
    """One way to run the collectives.

    policy: of a thinwire group; None: ``torch.distributed`` over a plain gloo group, or MPI's own collectives. cast: to bf16
    before and back after, which is timed with it. group: contenders of the same one share it. over: the transport; None:
    the plan's.
    """

    name: str
    group: str
    policy: Policy | None = None
    cast: bool = False
    over: str | None = None


PLAIN = Contender("plain", "plain")
PLAIN_BF16 = Contender("plain bf16", "plain", cast=True)
CONTROL = Contender("control", "control")
"""As ``plain``, over another group: how far it is from ``plain`` is noise."""
GLOO = Contender("gloo", "gloo", over="gloo")
GLOO_BF16 = Contender("gloo bf16", "gloo", cast=True, over="gloo")
"""``torch.distributed`` over gloo where the plan's transport is MPI."""
BASELINES = (PLAIN.name, PLAIN_BF16.name, GLOO.name, GLOO_BF16.name, "none")


def of_policy(spec: str | Policy) -> Contender:
    """A thinwire group of a policy: a preset's name or a TOML file."""
    policy = load(spec)
    return Contender(policy.name, policy.name, policy)


def of_codec(codec: Codec, name: str, algorithm: Algorithm = "two_shot") -> Contender:
    """A thinwire group that sends all messages through one codec, small ones too."""
    choice = dict.fromkeys(OPS, ByDtype.of(codec))
    everything = AxisPolicy(
        codecs={} if codec == NONE else choice,
        min_nbytes=0,
        algorithm=algorithm,
        allow_without_feedback=True,
    )
    # Over a data-parallel group gathers are of the axis zero.
    return Contender(name, name, Policy(name, {"dp": everything, "zero": everything}))


@dataclass(frozen=True)
class Plan:
    """contenders: in the order of the output. sizes: bytes of the message. dtype: fp32, bf16 or fp16.

    A sample is ``calls`` calls one after the other; ``repeats`` samples of each contender count, ``warmup`` before them
    do not. check: compare the bits of results between ranks and between calls. transport: gloo or mpi.
    Raises UnsupportedError for what cannot be run.
    """

    contenders: tuple[Contender, ...]
    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: int
    dtype: str = "fp32"
    warmup: int = 2
    repeats: int = 7
    calls: int = 1
    check: bool = False
    transport: str = "gloo"

    def __post_init__(self) -> None:
        names = [contender.name for contender in self.contenders]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UnsupportedError(
                f"named twice: {', '.join(twice)} (baselines are always there); name each once"
            )
        if "send_recv" in self.ops and self.ranks < 2:
            raise UnsupportedError("send_recv needs two ranks or more; name other ops, or add ranks")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def cases(self) -> list[tuple[str, int]]:
        """(op, bytes), in the order in which they run."""
        return [(op, nbytes) for op in self.ops for nbytes in self.sizes]

    def turn(self, repeat: int) -> Sequence[Contender]:
        """The contenders in a repeat's order: each is first in its turn, so that a disturbance hits all of them."""
        first = repeat % len(self.contenders)
        return [*self.contenders[first:], *self.contenders[:first]]


def contenders(
    codecs: Sequence[tuple[str, Codec]],
    policies: Sequence[str],
    dtype: str,
    control: bool = False,
    gloo: bool = False,
    algorithms: Sequence[Algorithm] = ("two_shot",),
) -> tuple[Contender, ...]:
    """The baselines, then codecs (with each algorithm) and policies. A cast saves bytes of fp32 only."""
    baselines = [PLAIN, *([CONTROL] if control else []), PLAIN_BF16, *([GLOO, GLOO_BF16] if gloo else [])]
    baselines = [contender for contender in baselines if dtype == "fp32" or not contender.cast]
    ours = [
        of_codec(codec, name if algorithm == "two_shot" else f"{name} {algorithm}", algorithm)
        for name, codec in codecs
        if codec != NONE
        for algorithm in algorithms
    ]
    return (*baselines, of_codec(NONE, "none"), *ours, *map(of_policy, policies))
