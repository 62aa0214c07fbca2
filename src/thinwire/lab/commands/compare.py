"""``thinwire compare``: all schemes in one run, and the page that shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ..cluster import cluster
from ..compare import DEFAULT_POLICIES, Plan, scheme
from ..compare import compare as run_comparison
from ..report import write_report
from ..wiring import Wiring
from .options import compile_kernels, ranks_per_host, run_options, shown, train_config
from .progress import steps_progress
from .sizes import size

# Enough for speeds and bytes that mean something on two cores, not for a verdict on the loss.
_QUICK: dict[str, Any] = {
    "policies": "none,bf16,naive-zfp:8,mzhybrid,zhybrid,balanced",
    "steps": 16,
    "block": 4,
    "micro_batch": 2,
    "link": "150mbit",
}


@click.command()
@run_options
@click.option("--policies", default=",".join(DEFAULT_POLICIES), metavar="A,B,...", show_default=True,
              help="Presets, TOML files, sharding schemes (zeropp, zero3:bf16), plain (PyTorch over gloo); "
              "with --ddp plain:HOOK and none:HOOK, too: "
              "bf16, fp16, powersgd=RANK; with FSDP2 the one of bf16.")  # fmt: skip
@click.option(
    "--ddp", is_flag=True, help="Under PyTorch's DistributedDataParallel; needs --layout dp=N, sets --zero 0."
)
@click.option("--steps", type=click.IntRange(4), default=300, show_default=True, help="Steps of each run.")
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True,
              help="Runs of each policy; loss parity needs 5.")  # fmt: skip
@click.option("--block", type=click.IntRange(2), default=10, show_default=True,
              help="Steps of one policy before the next one's turn.")  # fmt: skip
@click.option(
    "--bucket", type=size, default="4MiB", show_default=True, help="Gradients that travel together."
)
@click.option("--quick", is_flag=True, help="Six policies, few steps: under three minutes on two cores.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for results.")
@click.pass_context
def compare(
    context: click.Context,
    /,
    policies: str,
    steps: int,
    seeds: int,
    block: int,
    ddp: bool,
    bucket: int,
    quick: bool,
    out: Path,
    hosts: int,
    link: str,
    latency_ms: float,
    paced: bool,
    **settings: Any,
) -> None:
    """Train the same GPT under several policies, alternating, and write one page that compares them.

    Writes result.json, report.html and PNG figures to --out. Interrupt it at any time: the same command goes
    on where it stopped, and more policies or seeds can be added to the same folder. With --ddp or plain among the
    policies, runs that were not finished begin anew.
    """
    if quick:
        chosen = {name: value for name, value in _QUICK.items() if not _is_given(context, name)}
        policies, steps = chosen.get("policies", policies), chosen.get("steps", steps)
        block, link = chosen.get("block", block), chosen.get("link", link)
        settings["micro_batch"] = chosen.get("micro_batch", settings["micro_batch"])
    console = Console(stderr=True)
    if ddp:
        if settings["zero"] and _is_given(context, "zero"):
            raise click.UsageError("--ddp keeps all state on every rank: leave out --zero")
        settings["zero"] = 0
    config = train_config(steps=steps, ddp=ddp, bucket_bytes=bucket, **settings)
    names = tuple(p.strip() for p in policies.split(",") if p.strip())
    plan = Plan(config, settings["model"], names, tuple(range(seeds)), block)
    wiring = Wiring(ranks_per_host=ranks_per_host(config, hosts))
    compile_kernels(console, [p for name in names for p in scheme(name).policies(config, wiring)])
    console.print(f"[bold]{config.layout.world} ranks on {hosts} hosts, link {link}[/bold]: {shown(config)}")
    with cluster(config.layout.world, hosts, link, latency_s=latency_ms / 1e3, paced=paced) as places:
        console.print(f"network: {places.emulation}. {places.note}")
        with steps_progress(console) as update:
            path = run_comparison(plan, places, out, update)
    written = write_report(path, out)
    console.print(f"wrote {path} and {len(written)} files beside it")
    click.echo(f"Open {written[0]}")


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
