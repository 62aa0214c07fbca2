"""accelerate under compression: its loop, accumulated gradients, its checkpoints, and FSDP2 as far as the CPU allows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore

from support import TIMEOUT_S
from thinwire import GroupOptions, compress_fsdp, stats
from thinwire.errors import CheckpointError, SpecError, UnsupportedError
from thinwire.integrate.accelerate import compress
from thinwire.launch import run_ranks

from . import language_models as models

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("kernels")


def accelerator(rank: int, **settings: Any) -> Any:
    os.environ |= {"LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}  # as torchrun does; the group is made
    from accelerate import Accelerator

    return Accelerator(cpu=True, **settings)


def batch(number: int, rank: int, size: int = 4) -> Tensor:
    return torch.stack(models.pieces(size, first=size * (2 * number + rank)))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


class Run:
    """A model, its optimizer and, with a codec, compression, under an accelerator."""

    def __init__(
        self, rank: int, kind: str, codec: str | None, *, sgd: bool = False, **settings: Any
    ) -> None:
        self.rank = rank
        self.accelerator = accelerator(rank, **settings)
        if codec is not None:
            self.compression = compress(self.accelerator, models.policy(codec))
        made = models.make(kind)
        parameters = made.parameters()
        optimizer = torch.optim.SGD(parameters, 1.0) if sgd else torch.optim.AdamW(parameters, 1e-2)
        self.model, self.optimizer = self.accelerator.prepare(made, optimizer)

    def step(self, *batches: Tensor) -> float:
        """One step over micro-batches of equal size; the loss of the last one."""
        for tokens in batches:
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, tokens)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return loss.item()

    def steps(self, first: int, last: int) -> list[float]:
        return [self.step(batch(number, self.rank)) for number in range(first, last)]


def _accumulates(rank: int, world: int) -> None:
    """Two micro-batches, reduced once, are the whole batch's gradient up to the error of two encodings."""
    largest = 0.0
    for peer in range(world):
        alone = models.make("gpt2")
        loss_of(alone, batch(0, peer)).backward()
        largest = max(largest, *(float(p.grad.abs().max()) for p in alone.parameters()))
    tokens = batch(0, rank)
    exact = Run(rank, "gpt2", None, sgd=True)
    exact.step(tokens)
    coded = Run(rank, "gpt2", "int8:block=32", sgd=True, gradient_accumulation_steps=2)
    coded.step(*tokens.split(2))
    (sent,) = [m for m in coded.compression.stats().messages if m.compressed]
    trained = sum(p.numel() for p in alone.parameters())
    assert sent.raw_bytes < 1.01 * 4 * trained, "reduced once"
    # A value is off by half of 1/127 of its block's largest: the peer's, which is half of the mean, and the mean itself.
    bound = 1.5 * largest / 254 * 1.001 + 1e-6
    for a, b in zip(models.parameters(exact.model), models.parameters(coded.model), strict=True):
        assert float((a - b).abs().max()) <= bound, a.shape


def _loop(
    rank: int, world: int, kind: str, folder: Path, settings: dict[str, Any], report: Any
) -> list[Tensor]:
    codec = "int4:block=32,round=stochastic"
    exact, coded = Run(rank, kind, None, **settings), Run(rank, kind, codec, **settings)
    expected, found = exact.steps(0, 8), coded.steps(0, 4)
    coded.accelerator.save_state(str(folder))
    assert (folder / f"thinwire_{rank}.pt").is_file()
    found += coded.steps(4, 8)
    assert expected[0] - expected[-1] > 0.5
    assert abs(found[-1] - expected[-1]) < 0.05
    (sent,) = [m for m in coded.compression.stats().messages if m.compressed]
    assert (sent.axis, sent.op, sent.role) == ("dp", "all_reduce", "gradient")
    assert sent.raw_bytes > 0.95 * 8 * 4 * sum(p.numel() for p in models.parameters(coded.model))
    assert sent.ratio > 6, "int4 and a scale of 4 bytes for 32 values: 6.4, but for the heads of frames"

    resumed = Run(rank, kind, codec, **settings)
    resumed.accelerator.load_state(str(folder))
    resumed.steps(4, 8)
    assert all(map(torch.equal, models.parameters(coded.model), models.parameters(resumed.model)))
    ends = coded.compression.models[0].state_dict(), resumed.compression.models[0].state_dict()
    assert not [name for name, tensor in ends[0].items() if not torch.equal(tensor, ends[1][name])]
    return models.parameters(coded.model)


def _refused(rank: int, folder: Path) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState
    from accelerate.utils import DDPCommunicationHookType

    run = Run(rank, "gpt2", None)
    with pytest.raises(UnsupportedError, match="a model is prepared already; call it before prepare"):
        compress(run.accelerator)
    with pytest.raises(SpecError, match="unknown policy"):
        compress(accelerator(rank), "balancd")
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    with pytest.raises(UnsupportedError, match="has comm_hook=fp16"):
        compress(accelerator(rank, kwargs_handlers=[hook]))
    (folder / f"thinwire_{rank}.pt").unlink()
    resumed = Run(rank, "gpt2", "int4:block=32")
    with pytest.raises(CheckpointError, match="is missing: the checkpoint was written without compression"):
        resumed.accelerator.load_state(str(folder))
    AcceleratorState._reset_state(True)
    alone = Accelerator()
    with pytest.raises(UnsupportedError, match=r"2 ranks, .* for itself alone .* Accelerator\(cpu=True\)"):
        compress(alone)


def _gpt2(rank: int, world: int, folder: Path, report: Any) -> list[Tensor]:
    _accumulates(rank, world)
    parameters = _loop(rank, world, "gpt2", folder, {}, report)
    _refused(rank, folder)
    return parameters


@pytest.mark.slow
def test_a_loop_with_gpt2(tmp_path: Path) -> None:
    first, second = run_ranks(_gpt2, 2, tmp_path, timeout=TIMEOUT_S)
    assert all(map(torch.equal, first, second)), "all ranks have the same parameters"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("neox", {}), ("llama", {}), ("llama", {"mixed_precision": "bf16"})],
)
def test_a_loop(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    first, second = run_ranks(_loop, 2, kind, tmp_path, settings, timeout=TIMEOUT_S)
    assert all(map(torch.equal, first, second))


def _fsdp(rank: int, world: int, folder: Path, report: Any) -> None:
    """accelerate makes FSDP models on GPUs only. Here it is told that it is to: ``prepare`` is its own code."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    dist.destroy_process_group()
    options = GroupOptions(policy=models.policy("int4:block=32,round=stochastic"), feedback_by_caller=True)
    store = FileStore(str(folder / "store"), world)
    dist.init_process_group("thinwire", store=store, rank=rank, world_size=world, pg_options=options)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    made = accelerator(rank, fsdp_plugin=plugin)
    assert made.distributed_type == DistributedType.MULTI_CPU, "else this can be tested as it is used"
    made.state.distributed_type, made.state.fsdp_plugin = DistributedType.FSDP, plugin
    made.state.device_mesh = None
    with pytest.raises(UnsupportedError, match=r"is FSDP; .* call thinwire\.compress_fsdp after prepare"):
        compress(made)
    model = models.make("llama")
    model, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    compression = compress_fsdp(model)
    losses = []
    for number in range(8):
        loss = loss_of(model, batch(number, rank))
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] - losses[-1] > 0.5
    reduced = [m for m in stats(dist.group.WORLD).messages if m.op == "reduce_scatter" and m.compressed]
    assert {m.role for m in reduced} == {"gradient"}
    assert all(m.ratio > 5 for m in reduced)
    assert any(float(t.abs().max()) > 0 for n, t in compression.state_dict().items() if "@" in n)


@pytest.mark.slow
def test_fsdp2(tmp_path: Path) -> None:
    run_ranks(_fsdp, 2, tmp_path, timeout=TIMEOUT_S)
