"""Options that several commands share, and what they mean for a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from ...codecs import warm_up
from ...integrate.degrees import ShardingDegrees
from ...policy import Policy
from ..cluster import spread
from ..train.config import DataConfig, OptimizerConfig, TrainConfig
from ..train.data import load_text
from ..train.layout import Layout
from ..train.model import ModelConfig
from ..train.pipeline import SCHEDULES

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--layout", default="dp=2,tp=2,pp=2", show_default=True, metavar="AXIS=N,...",
                 help="Ranks per axis: data (dp), tensor (tp), pipeline (pp) parallelism."),
    click.option("--zero", type=click.IntRange(0, 3), default=1, show_default=True,
                 help="ZeRO stage: 0 replicas, 1 sharded optimizer state, 2 and 3 FSDP2."),
    click.option("--zero-degrees", default=None, metavar="NAME=N,...",
                 help="Ranks that params, grads, optim (and a secondary copy) are cut over, instead of a stage."),
    click.option("--hosts", type=click.IntRange(1), default=4, show_default=True,
                 help="Emulated hosts; the ranks are spread evenly, neighbours together."),
    click.option("--link", default="200mbit", show_default=True, metavar="RATE",
                 help="Rate of each host's link, e.g. 200mbit, 1gbit; none: no emulation. Needs root."),
    click.option("--latency-ms", type=click.FloatRange(0, 1000), default=0.0, show_default=True,
                 help="Latency added one way between hosts."),
    click.option("--paced", is_flag=True, help="Without root: senders wait instead of shaped links."),
    click.option("--model", default="lab", show_default=True, metavar="PRESET", help="Size of the GPT."),
    click.option("--batch", type=click.IntRange(1), default=8, show_default=True,
                 help="Sequences in a global batch."),
    click.option("--micro-batch", type=click.IntRange(1), default=1, show_default=True,
                 help="Sequences in a micro-batch."),
    click.option("--schedule", type=click.Choice(sorted(SCHEDULES)), default="1f1b", show_default=True,
                 help="Pipeline schedule."),
    click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True),
    click.option("--lr", type=click.FloatRange(0, min_open=True), default=1e-3, show_default=True,
                 help="Peak learning rate."),
    click.option("--data", multiple=True, type=click.Path(path_type=Path), metavar="PATH",
                 help="Text file or folder, may be repeated. Default: the sources of Python's library."),
    click.option("--tokens", type=click.Choice(["byte", "bpe"]), default="byte", show_default=True),
)  # fmt: skip


def run_options(function: F) -> F:
    """Decorator: the options that describe a training run and its network."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def train_config(
    *,
    layout: str,
    zero: int,
    model: str,
    batch: int,
    micro_batch: int,
    schedule: str,
    precision: str,
    lr: float,
    data: tuple[Path, ...],
    tokens: str,
    steps: int,
    seed: int = 0,
    zero_degrees: str | None = None,
    ddp: bool = False,
    bucket_bytes: int = 4 << 20,
) -> TrainConfig:
    """The settings of a run, checked: raises what is wrong with them before any process is started."""
    parsed = Layout.parse(layout)
    config = TrainConfig(
        model=ModelConfig.preset(model),
        layout=parsed,
        optimizer=OptimizerConfig(lr=lr, min_lr=lr / 10, warmup=min(20, max(1, steps // 10))),
        data=DataConfig(paths=tuple(str(p) for p in data), tokens=tokens),
        seed=seed,
        steps=steps,
        global_batch=batch,
        micro_batch=micro_batch,
        schedule=schedule,
        zero=zero,
        ddp=ddp,
        degrees=None if zero_degrees is None else ShardingDegrees.parse(zero_degrees),
        bucket_bytes=bucket_bytes,
        precision=precision,
    )
    config.check(parsed.world)
    if tokens == "byte":
        load_text(config.data, config.model.vocab, None)
    return config


def ranks_per_host(config: TrainConfig, hosts: int) -> int:
    """Neighbours that share a host; 1 where hosts have different numbers of ranks."""
    sizes = set(spread(config.layout.world, hosts))
    return sizes.pop() if len(sizes) == 1 else 1


def compile_kernels(console: Any, policies: Iterable[Policy]) -> None:
    """Compile the kernels of the policies' codecs, visibly, before ranks are timed; later starts load them from a cache."""
    with console.status("Preparing codec kernels (compiled on first use, then cached) ..."):
        warm_up(sorted({codec for policy in policies for codec in policy.used_codecs()}, key=str))


def shown(config: TrainConfig) -> str:
    """One line that describes a run."""
    model = config.model
    under = "DDP" if config.ddp else f"ZeRO-{config.zero}"
    if config.degrees is not None:
        under = f"degrees {config.degrees}"
    return (
        f"{config.layout}, {under}, {model.layers} layers of {model.hidden}, sequence {model.sequence}, "
        f"batch {config.global_batch}, {config.precision}"
    )
