"""Hugging Face ``transformers``: a ``Trainer`` under compression, residuals in its checkpoints. ::

    from thinwire.integrate.transformers import compress

    trainer = Trainer(...)
    compress(trainer, "balanced")
    trainer.train()  # or train(resume_from_checkpoint=True)

Only gradients take thinwire's group: parameters, metrics and the predictions of an evaluation stay exact. Needs
transformers, which is why the package does not import this module by itself.
"""

from __future__ import annotations

import functools
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from ..policy import Policy
from . import accelerate, rank_files
from .accelerate import AccelerateCompression

# Not by name, so that the package can be checked where there is no transformers.
_TrainerCallback: Any = import_module("transformers").TrainerCallback
_trainer_utils: Any = import_module("transformers.trainer_utils")


class _Checkpoints(_TrainerCallback):  # type: ignore[misc]  # its base is Any
    """Keeps each rank's residuals in the folder of each checkpoint."""

    def __init__(self, compression: AccelerateCompression, resume_without_residuals: bool) -> None:
        self._compression = compression
        self._resume_without_residuals = resume_without_residuals
        self.resume_from: str | None = None
        """The folder that the run under way goes on from."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model has been wrapped, and the Trainer's own state is loaded."""
        if self.resume_from is None or self._resume_without_residuals or not self._compression.models:
            return
        saved = rank_files.load(self.resume_from, args.process_index, args.world_size)
        self._compression.models[-1].load_state_dict(saved)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer calls it on every rank, after its own files."""
        if args.save_only_model or state.is_hyper_param_search or not self._compression.models:
            return
        folder = Path(args.output_dir) / f"{_trainer_utils.PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)  # rank 0 may still be making it
        kept = self._compression.models[-1].state_dict()
        rank_files.save(folder, args.process_index, args.world_size, kept)


def compress(
    trainer: Any,
    policy: Policy | str = "balanced",
    *,
    seed: int = 0,
    resume_without_residuals: bool = False,
) -> AccelerateCompression:
    """Let a ``Trainer`` under DistributedDataParallel average gradients through a policy, with error feedback if it asks.

    Call it before ``train``. policy: a Policy, a preset's name or a TOML file. seed: of stochastic rounding. Residuals lie
    in the checkpoints (``checkpoint-STEP/thinwire_RANK.pt``, not with ``save_only_model``), and a resumed run goes on bit
    for bit. resume_without_residuals: begin with none, for checkpoints of runs without compression or of other numbers of
    ranks. On one rank nothing is compressed. Under ``hyperparameter_search`` checkpoints are the Trainer's alone.

    Raises UnsupportedError under FSDP or DeepSpeed, and after ``train`` has wrapped the model; SpecError for an unknown
    policy. A resumed ``train`` raises CheckpointError for residuals that are missing or of another run.
    """
    compression = accelerate.compress(trainer.accelerator, policy, seed=seed)
    checkpoints = _Checkpoints(compression, resume_without_residuals)
    trainer.add_callback(checkpoints)
    train = trainer.train

    # Callbacks are not told which checkpoint a run goes on from.
    @functools.wraps(train)
    def train_from(
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        folder = resume_from_checkpoint
        if folder is True:
            folder = _trainer_utils.get_last_checkpoint(trainer.args.output_dir)
        checkpoints.resume_from = os.fspath(folder) if folder else None
        return train(resume_from_checkpoint, *args, **kwargs)

    trainer.train = train_from
    return compression
