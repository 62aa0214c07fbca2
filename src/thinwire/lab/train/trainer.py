"""The training loop of one rank."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.errors import LayoutError, UnsupportedError
from thinwire.group import ThinwireGroup
from thinwire.integrate.ladder import Ladder
from thinwire.integrate.mesh import groups

from ..dtypes import DTYPES
from . import checkpoint
from .config import TrainConfig
from .data import Batches, load_text
from .ddp import DdpUpdate
from .mesh import axis_group, axis_mesh, axis_rank
from .model import Stage
from .optim import LossScaler, learning_rate
from .pipeline import LoopRunner, PipelineRunner, Runner, example_tensors, layers_of, stages_of
from .plain import Hook
from .sharded import ShardedUpdate
from .step import agree, clip_factor, sum_over_ranks
from .tensor_parallel import TensorAxis, cross_entropy
from .update import Update
from .zero import BucketUpdate, FsdpUpdate


@dataclass(frozen=True)
class StepRecord:
    """One step, the same on every rank but for ``seconds``.

    step: from 1. loss: nats per token, over the global batch. grad_norm: before clipping; not finite if the step
    was skipped. seconds: this rank's wall time. tokens: in the global batch. skipped: the update was not taken.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    tokens: int
    skipped: bool


class Trainer:
    """Trains ``config.model`` with one process per rank of ``mesh``; all ranks call the same methods.

    mesh: over all ranks, with axes as in ``config.layout.mesh_sizes()``. cache: folder for tokenized text. hook: PyTorch's
    own way to send gradients, instead of what the groups of the mesh do; with ``config.ddp``, or bf16 with FSDP2. ladder:
    groups of ``config.degrees``; the mesh's then carry nothing.
    Raises LayoutError if the layout does not fit the ranks or the model, DataError for unusable text.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: DeviceMesh,
        cache: Path | None = None,
        hook: Hook | None = None,
        ladder: Ladder | None = None,
    ) -> None:
        config.check(mesh.size())
        self.config = config
        self.steps_done = 0
        self._text = load_text(config.data, config.model.vocab, cache)
        model = config.model
        self._batches = Batches(self._text.train, model.sequence, config.global_batch, config.seed)
        self._held_out = Batches(self._text.validation, model.sequence, config.global_batch, config.seed)
        self._mesh = mesh
        self._tp = TensorAxis.of(axis_mesh(mesh, "tp"))
        self._dp_rank = axis_rank(mesh, "dp")
        stages = self._make_stages(axis_rank(mesh, "pp"))
        self._groups: dict[str, ThinwireGroup] = groups(mesh) if ladder is None else ladder.groups()
        self._update = _make_update(stages, mesh, config, hook, ladder)
        self._runner = self._make_runner(self._update.wrapped(stages), mesh)
        # The last stage of one tp rank reports the loss.
        self._reports = config.stages - 1 in stages and self._tp.rank == 0
        self._scaler = LossScaler(config.loss_scale if config.precision == "fp16" else None)

    @property
    def loss_scale(self) -> float:
        """What the next step multiplies its loss by; 1 but in fp16."""
        return self._scaler.scale

    def step(self) -> StepRecord:
        """Train on the next global batch."""
        begin = time.perf_counter()
        config = self.config
        # 1. this rank's sequences
        inputs, targets = self._part(self._batches, self.steps_done)
        # 2. forward and backward; gradients travel as soon as they are complete
        scale = self._scaler.scale
        self._update.start(config.micro_batches, scale)
        losses = self._runner.forward_backward(inputs, targets, scale)
        # 3. the mean gradients
        gradients = self._update.finish()
        # 4. what all ranks have to agree on
        share = 1 / (config.micro_batches * config.layout.dp)
        loss, norm = agree(losses if self._reports else [], share, gradients)
        skipped = not math.isfinite(norm)
        # 5. the update, on every rank or on none
        lr = learning_rate(config.optimizer, self.steps_done, config.steps)
        if skipped:
            self._update.skip()
        else:
            self._update.take(lr, clip_factor(norm, config.optimizer.clip))
        self._scaler.update(skipped)
        self.steps_done += 1
        tokens = config.global_batch * config.model.sequence
        seconds = time.perf_counter() - begin
        return StepRecord(self.steps_done, loss, norm, lr, seconds, tokens, skipped)

    def evaluate(self) -> float:
        """Mean loss in nats per token on ``eval_batches`` global batches of held-out text, always the same ones."""
        losses: list[float] = []
        for batch in range(self.config.eval_batches):
            losses += self._runner.forward(*self._part(self._held_out, batch))
        share = 1 / (self.config.eval_batches * self.config.micro_batches * self.config.layout.dp)
        return sum_over_ranks([sum(losses) * share if self._reports else 0.0])[0]

    def weights(self) -> dict[str, Tensor]:
        """The parameters by name, sharing memory with the live ones; what tp or FSDP splits is a DTensor."""
        return self._update.weights()

    def save(self, folder: str | Path, keep: int = 2) -> Path:
        """Write a checkpoint below ``folder`` and return where; the newest ``keep`` stay. See ``checkpoint.save``."""
        values: dict[str, Any] = {
            **self._prefixed("weights", self.weights()),
            **self.state(),
            **self._codec_states(),
        }
        record = {"step": self.steps_done, "scaler": self._scaler.state(), "run": self._identity()}
        return checkpoint.save(Path(folder), values, record, keep)

    def load(self, folder: str | Path, weights_only: bool = False) -> None:
        """Go on from the latest checkpoint below ``folder``, bit for bit.

        weights_only: take the parameters alone, from a run of any layout, as the start of this one.
        Raises CheckpointError if there is none, it is incomplete, or of another run.
        """
        path, record = checkpoint.latest(Path(folder))
        weights = self._prefixed("weights", self.weights())
        if weights_only:
            checkpoint.load(path, weights)
            self._update.weights_changed()
            return
        checkpoint.check_same_run(path, record["run"], self._identity())
        codecs = self._codec_states()
        loaded = checkpoint.load(path, {**weights, **self.state(), **codecs})
        for name, group in zip(codecs, self._groups.values(), strict=True):
            group.load_codec_states(loaded[name])
        self._update.state_changed()
        self._scaler.load_state(record["scaler"])
        self.steps_done = int(record["step"])

    def _make_stages(self, rank: int) -> dict[int, Stage]:
        config = self.config
        # FSDP keeps fp32 parameters and casts what it gathers; buckets keep fp32 masters beside the parameters.
        fsdp = config.zero >= 2 and config.degrees is None
        dtype = torch.float32 if fsdp else DTYPES[config.precision]
        return {
            index: Stage(
                config.model,
                layers_of(index, config.stages, config.model.layers),
                self._tp,
                config.seed,
                dtype,
            )
            for index in stages_of(config.schedule, rank, config.layout.pp)
        }

    def _make_runner(self, stages: dict[int, nn.Module], mesh: DeviceMesh) -> Runner:
        config = self.config
        group = axis_group(mesh, "pp")
        if group is None:
            return LoopRunner(stages[0], self._loss, config.micro_batches)
        vocab = config.model.vocab // self._tp.size
        examples = example_tensors(config.model, config.micro_batch, vocab, DTYPES[config.precision])
        return PipelineRunner(
            stages, config.stages, config.schedule, group, self._loss, config.micro_batches, *examples
        )

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets, self._tp)

    def _part(self, batches: Batches, index: int) -> tuple[Tensor, Tensor]:
        tokens = batches.part(index, self._dp_rank, self.config.layout.dp)
        return tokens[:, :-1], tokens[:, 1:]

    def gradients(self) -> dict[str, Tensor]:
        """The last step's mean gradients of this rank's parameters, clipped, fp32; ZeRO-0 only."""
        return self._update.gradients()

    def state(self) -> dict[str, Tensor]:
        """What this rank needs besides the weights to go on bit for bit, sharing memory with the live tensors."""
        # Stochastic rounding draws from the number of calls that a group has had.
        calls = {f"rank{dist.get_rank()}.{axis}.calls": g.calls for axis, g in self._groups.items()}
        return self._prefixed("state", {**self._update.state(), **calls})

    def _codec_states(self) -> dict[str, bytes]:
        """What the codecs of this rank's groups remember, in the order of the groups."""
        rank = dist.get_rank()
        return {f"state/rank{rank}.{axis}.codecs": g.codec_states() for axis, g in self._groups.items()}

    def _identity(self) -> dict[str, object]:
        return {**self.config.identity(), "text": self._text.digest}

    @staticmethod
    def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _make_update(
    stages: dict[int, Stage],
    mesh: DeviceMesh,
    config: TrainConfig,
    hook: Hook | None,
    ladder: Ladder | None,
) -> Update:
    """The update for the ZeRO stage; FSDP2 changes ``stages`` in place."""
    if (ladder is None) != (config.degrees is None) or (
        ladder is not None and ladder.degrees != config.degrees
    ):
        raise LayoutError(f"degrees {config.degrees} need the groups of a Ladder of the same degrees")
    if ladder is not None:
        return ShardedUpdate(stages[0], ladder, config)
    if config.ddp:
        return DdpUpdate(stages[0], axis_group(mesh, "dp"), config, hook)
    if config.zero >= 2:
        return FsdpUpdate(list(stages.values()), mesh, config, hook)
    if hook is not None:
        raise UnsupportedError(
            f"hook {hook.kind} needs DistributedDataParallel (ddp) or FSDP2 (zero = 2 or 3)"
        )
    return BucketUpdate(list(stages.values()), mesh, config)
