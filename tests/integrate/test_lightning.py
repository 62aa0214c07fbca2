"""Lightning: the Trainer's strategy, Fabric's, and scripts of Lightning's that do not know thinwire."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire
from support import TIMEOUT_S, gaussian
from thinwire.errors import CheckpointError, UnsupportedError
from thinwire.launch import run_ranks

lightning = pytest.importorskip("lightning")

from thinwire.integrate.lightning import ThinwireFabricStrategy, ThinwireStrategy  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels")
PRELOAD = ("lightning", "thinwire.integrate.lightning")
ROOT = Path(thinwire.__file__).parents[2]


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Several buckets, metrics that are reduced over the ranks, and a buffer that DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (x,) = batch
        loss = (self.layers(x) - x.roll(1, 1)).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Kept(lightning.pytorch.loggers.logger.DummyLogger):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.metrics.setdefault(step, {}).update(metrics)


def trainer_of(strategy: Any, folder: str, **settings: Any) -> Any:
    environment = lightning.fabric.plugins.environments.LightningEnvironment()
    return lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=dist.get_world_size(),
        plugins=[environment, *settings.pop("plugins", [])],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=4,
        **{"logger": False, "enable_checkpointing": False, "max_epochs": 2, **settings},
    )


def fit(strategy: Any, folder: str, ckpt: str | None = None, **settings: Any) -> tuple[Any, Module]:
    """Eight steps an epoch on each of two ranks."""
    module, trainer = Module(), trainer_of(strategy, folder, **settings)
    trainer.fit(module, batches(), ckpt_path=ckpt)
    return trainer, module


def batches() -> DataLoader[Any]:
    data = TensorDataset(gaussian(0, 256 * 64).view(256, 64))
    return DataLoader(data, batch_size=16, shuffle=True)


def values(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def same_on_all_ranks(flat: Tensor) -> bool:
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    return all(torch.equal(every[0], other) for other in every)


def in_lightning(rank: int) -> None:
    """This process is a rank that somebody else has started, and its default group is there already."""
    os.environ["LOCAL_RANK"] = str(rank)
    warnings.filterwarnings("ignore")


def _trained(rank: int, world: int, folder: str, report: Any) -> None:
    in_lightning(rank)
    _, plain = fit(lightning.pytorch.strategies.DDPStrategy(), folder)
    strategy, logger = ThinwireStrategy(bucket_cap_mb=0.05), Kept()
    _, module = fit(strategy, folder, logger=logger)
    assert same_on_all_ranks(values(module))
    assert not torch.equal(values(module), values(plain)), "something was lossy"
    first, expected, found = plain.losses[0], plain.losses[-1], module.losses[-1]
    assert abs(found - expected) < 0.05 * (first - expected), "near the run without compression"

    # All that went through the policy are gradients: a step's 33 K parameters, each as 4.25 bits.
    messages = strategy.compressions.stats().messages
    assert {message.role for message in messages if message.codec != "pass-through"} == {"gradient"}
    (sums,) = strategy.compressions.stats().by().values()
    assert sums.ratio > 5
    assert type(dist.group.WORLD) is dist.ProcessGroup
    logged = logger.metrics
    assert set(logged) >= {4, 8, 12, 16}
    assert logged[16]["thinwire/dp/all_reduce/ratio"] > 5
    assert logged[4]["thinwire/dp/all_reduce/calls"] < logged[16]["thinwire/dp/all_reduce/calls"]

    # Resumed after its first epoch, the run is the same one, bit for bit; a trainer may fit again.
    saved = f"{folder}/first.ckpt"
    trainer, _ = fit(ThinwireStrategy(bucket_cap_mb=0.05), folder, max_epochs=1)
    trainer.save_checkpoint(saved)
    resumed = Module()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(resumed, batches(), ckpt_path=saved)
    assert torch.equal(values(resumed), values(module))
    assert resumed.losses == module.losses[8:]
    trainer.strategy.remove_checkpoint(saved)
    assert not Path(folder, f"thinwire-rank{rank}", "first.ckpt").exists()


def test_the_trainer_compresses_and_resumes(tmp_path: Path) -> None:
    run_ranks(_trained, 2, str(tmp_path), timeout=TIMEOUT_S, preload=PRELOAD)


def _variants(rank: int, world: int, folder: str, report: Any) -> None:
    in_lightning(rank)
    callbacks = lightning.pytorch.callbacks
    keeping = callbacks.ModelCheckpoint(
        folder, "{epoch}", save_top_k=1, save_last="link", monitor="epoch", mode="max"
    )
    full = ThinwireStrategy()
    _, module = fit(full, folder, enable_checkpointing=True, callbacks=[keeping])
    assert {path.name for path in Path(folder, f"thinwire-rank{rank}").iterdir()} == {"epoch=1.ckpt"}
    one_epoch = f"{folder}/one.ckpt"
    fit(ThinwireStrategy(), folder, max_epochs=1)[0].save_checkpoint(one_epoch)
    _, fresh = fit(ThinwireStrategy(resume_without_residuals=True), folder, one_epoch)
    assert not torch.equal(values(fresh), values(module)), "residuals are what makes a resumed run exact"
    assert fresh.losses != module.losses[8:]
    fit(lightning.pytorch.strategies.DDPStrategy(), folder, one_epoch)
    _, longer = fit(ThinwireStrategy(), folder, f"{folder}/last.ckpt", max_epochs=3)
    assert len(longer.losses) == 8

    # Accumulated gradients travel once a step.
    counted = ThinwireStrategy()
    _, accumulated = fit(counted, folder, accumulate_grad_batches=4, precision="bf16-mixed")
    few, all_steps = (s.compressions.stats().by("role")["gradient",].raw_bytes for s in (counted, full))
    assert all_steps == 4 * few
    assert same_on_all_ranks(values(accumulated))

    # The first steps overflow and are skipped; residuals are held without the scale.
    scaled = ThinwireStrategy()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28)
    fp16 = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    _, half = fit(scaled, folder, plugins=[fp16])
    assert scaler.get_scale() < 2.0**28
    assert half.losses[-1] < half.losses[0]
    assert same_on_all_ranks(values(half))
    residuals = scaled.compressions.models[0].state_dict()
    assert all(bool(r.isfinite().all()) and r.abs().max() < 1 for k, r in residuals.items() if "@" in k)

    with pytest.raises(
        CheckpointError, match=r"was written under policy balanced .* resume_without_residuals=True"
    ):
        fit(ThinwireStrategy(policy="bf16"), folder, one_epoch)


@pytest.mark.slow
def test_checkpoints_precision_and_accumulation(tmp_path: Path) -> None:
    run_ranks(_variants, 2, str(tmp_path), timeout=TIMEOUT_S, preload=PRELOAD)


def _fabric(rank: int, world: int, folder: str, report: Any) -> None:
    in_lightning(rank)

    def run(strategy: Any, first: int, last: int, path: str = "") -> Tensor:
        environment = lightning.fabric.plugins.environments.LightningEnvironment()
        fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=[environment])
        fabric.launch()
        module = Module().layers
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=3e-3))
        state = {"model": model, "optimizer": optimizer, "step": first}
        if first:
            assert fabric.load(path, state) == {}
            assert state["step"] == first
        for step in range(first, last):
            x = gaussian(2 * step + rank, 16 * 64).view(16, 64)
            with fabric.no_backward_sync(model, enabled=step % 2 == 0):
                fabric.backward((model(x) - x.roll(1, 1)).square().mean())
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        state["step"] = last
        if path:
            fabric.save(path, state)
        return values(module)

    path = f"{folder}/fabric.ckpt"
    strategy = ThinwireFabricStrategy()
    expected = run(strategy, 0, 16)
    run(ThinwireFabricStrategy(), 0, 8, path)
    assert torch.equal(run(ThinwireFabricStrategy(), 8, 16, path), expected)
    assert same_on_all_ranks(expected)
    assert strategy.compressions.stats().by("role")["gradient",].ratio > 5


@pytest.mark.slow
def test_fabric(tmp_path: Path) -> None:
    run_ranks(_fabric, 2, str(tmp_path), timeout=TIMEOUT_S, preload=PRELOAD)


def script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the example for a few steps."""
    settings = ["--steps", "6", "--folder", str(folder)]
    return subprocess.run(
        [sys.executable, *words, *settings],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=150,
    )


EXAMPLE = "examples/lightning_trainer.py"
RUN = ("-m", "thinwire.cli", "run", "--policy", "balanced")


@pytest.mark.slow
def test_a_script_of_lightnings_that_does_not_change(tmp_path: Path) -> None:
    done = script(tmp_path, *RUN, "--nproc-per-node=2", EXAMPLE, "--plain")
    assert done.returncode == 0, done.stderr
    assert "DistributedDataParallel over axis dp, 2 ranks: with error feedback" in done.stderr
    (row,) = [
        line.split() for line in done.stderr.splitlines() if "int4:block" in line and "gradient" in line
    ]
    assert float(row[7]) > 5
    assert "loss" in done.stdout

    alone = script(tmp_path, *RUN, EXAMPLE, "--plain")
    assert alone.returncode != 0, (
        "thinwire run has started one rank, and Lightning starts none where others do"
    )
    assert "does not match the world size (1)" in alone.stderr


@pytest.mark.slow
def test_lightnings_own_launcher(tmp_path: Path) -> None:
    done = script(tmp_path, EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert "times smaller" in done.stderr
    assert "loss" in done.stdout


def test_what_the_strategy_refuses() -> None:
    with pytest.raises(UnsupportedError, match="ddp_comm_hook: the strategy gives"):
        ThinwireStrategy(ddp_comm_hook=lambda state, bucket: None)
    with pytest.raises(UnsupportedError, match="process_group"):
        ThinwireFabricStrategy(process_group=None)
