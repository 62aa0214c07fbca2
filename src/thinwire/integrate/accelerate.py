"""Hugging Face ``accelerate``: gradients of what ``prepare`` makes under compression, residuals in its checkpoints. ::

    from thinwire.integrate.accelerate import compress

    accelerator = Accelerator()  # cpu=True where there is no GPU
    compress(accelerator, "balanced")  # before prepare
    model, optimizer = accelerator.prepare(model, optimizer)
    ...
    accelerator.save_state(folder)  # and load_state

Only gradients take thinwire's group: parameters, buffers and what the script gathers stay exact. Needs accelerate, which
this module is handed and does not import. FSDP2, which accelerate has on GPUs only (on the CPU it ignores an
``fsdp_plugin`` and makes a DistributedDataParallel), takes its groups from the default one::

    dist.init_process_group("thinwire", pg_options=GroupOptions(policy="balanced", feedback_by_caller=True, backend="nccl"))
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model, optimizer = accelerator.prepare(model, optimizer)
    keep_in_checkpoints(accelerator, thinwire.compress_fsdp(model))

The test of it has no GPU: it tells accelerate to shard on the CPU, and trains; accelerate's own ``save_state`` of sharded
models does not run there.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..errors import UnsupportedError
from ..group import Stats
from ..policy import Policy
from ..presets import load
from . import rank_files
from .ddp import DdpCompression, compress_ddp, gradient_group

_DDP = ("NO", "MULTI_CPU", "MULTI_GPU")
"""What accelerate calls runs whose models it wraps in DistributedDataParallel, if there is more than one rank."""


class AccelerateCompression:
    """The compression of an accelerator's models; made by :func:`compress`."""

    def __init__(self, accelerator: Any, policy: Policy, seed: int, resume_without_residuals: bool) -> None:
        self._accelerator = accelerator
        self._policy = policy
        self._seed = seed
        self._resume_without_residuals = resume_without_residuals
        self.models: list[DdpCompression] = []
        """One for each prepared model, in their order."""

    def stats(self) -> Stats:
        """What this rank has sent of gradients."""
        return Stats.of([compression.group.traffic for compression in self.models])

    def take(self, model: DistributedDataParallel) -> None:
        """Compress the gradients of a model that has just been wrapped."""
        group = gradient_group(model, self._policy, seed=self._seed)
        scaler = self._accelerator.scaler
        scale = scaler.get_scale if scaler is not None and scaler.is_enabled() else None
        compression = compress_ddp(model, group=group, scale=scale)
        self.models.append(compression)
        keep_in_checkpoints(
            self._accelerator,
            compression,
            index=len(self.models) - 1,
            resume_without_residuals=self._resume_without_residuals,
        )


class _Handler:
    """In the place of accelerate's own: passes its settings on, and sees every model that is wrapped."""

    def __init__(self, before: Any, compression: AccelerateCompression) -> None:
        self._before = before
        self._compression = compression

    def to_kwargs(self) -> dict[str, Any]:
        settings: dict[str, Any] = self._before.to_kwargs() if self._before is not None else {}
        return settings

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        self._compression.take(model)


def compress(
    accelerator: Any,
    policy: Policy | str = "balanced",
    *,
    seed: int = 0,
    resume_without_residuals: bool = False,
) -> AccelerateCompression:
    """Let the models that ``accelerator.prepare`` wraps in DistributedDataParallel reduce gradients through a policy.

    Call it before ``prepare``. policy: a Policy, a preset's name or a TOML file. seed: of stochastic rounding. With fp16,
    residuals are held without the scaler's scale. ``save_state`` writes residuals beside accelerate's own files, and
    ``load_state`` takes them back, each rank its own (unless resume_without_residuals). On one rank nothing is compressed.

    Raises UnsupportedError for a run whose models are not wrapped so (for FSDP2 see :func:`keep_in_checkpoints`), for ranks
    that accelerate has not joined, for a hook in its settings, and after ``prepare``; SpecError for an unknown policy.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind not in _DDP:
        raise UnsupportedError(
            f"compress(accelerator): its distributed_type is {kind}; it must be {', '.join(_DDP[1:])}, or NO for one rank. "
            "Under FSDP2 call thinwire.compress_fsdp after prepare"
        )
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if kind == "NO" and ranks > 1:
        raise UnsupportedError(
            f"compress(accelerator): there are {ranks} ranks, and each would train for itself alone (distributed_type NO); "
            "on the CPU accelerate joins them with Accelerator(cpu=True)"
        )
    before = accelerator.ddp_handler
    hook = getattr(getattr(before, "comm_hook", None), "value", "no")
    if hook != "no":
        raise UnsupportedError(
            f"compress(accelerator): DistributedDataParallelKwargs has comm_hook={hook}, and a model takes one hook; leave "
            "it out"
        )
    if any(parameter.requires_grad for model in accelerator._models for parameter in model.parameters()):
        raise UnsupportedError("compress(accelerator): a model is prepared already; call it before prepare")
    compression = AccelerateCompression(accelerator, load(policy), seed, resume_without_residuals)
    accelerator.ddp_handler = _Handler(before, compression)
    return compression


def keep_in_checkpoints(
    accelerator: Any, state: rank_files.Stateful, *, index: int = 0, resume_without_residuals: bool = False
) -> None:
    """Let ``accelerator.save_state`` write each rank's residuals, and ``load_state`` take them back, bit for bit.

    state: as of ``thinwire.compress_fsdp(model)``, for a model that ``prepare`` has sharded over a thinwire group; those of
    :func:`compress` are kept already. index: among several models. resume_without_residuals: ``load_state`` leaves them
    out, so that checkpoints of runs without compression, or of other numbers of ranks, can be resumed.
    """
    rank, ranks = int(accelerator.process_index), int(accelerator.num_processes)

    def save(models: Any, weights: Any, folder: str) -> None:
        rank_files.save(folder, rank, ranks, state.state_dict(), index)

    def load_(models: Any, folder: str) -> None:
        if not resume_without_residuals:
            state.load_state_dict(rank_files.load(folder, rank, ranks, index))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load_)
