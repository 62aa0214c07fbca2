"""Lightning: ``Trainer(strategy=ThinwireStrategy(policy="balanced"), accelerator="cpu", devices=2)``.

Lightning's DDP strategies with compressed gradients and error feedback; Fabric's is :class:`ThinwireFabricStrategy`. Only
gradients go through the policy, over a group of their own: parameters, buffers, metrics and barriers stay exact. Needs the
package ``lightning`` (or ``pytorch_lightning``, where that is installed alone).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from typing import Any

import torch.distributed as dist

from ..errors import CheckpointError, UnsupportedError
from ..group import Stats, stats
from ..policy import Policy
from ..presets import load
from . import lightning_files
from .ddp import DdpCompression, compress_ddp, gradient_group

_OWN = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period", "process_group")


def _installed(*names: str) -> Any:
    """The first of these modules that is there."""
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as e:
            if e.name is None or e.name.split(".")[0] != name.split(".")[0]:
                raise  # it is there, and lacks something itself
    raise ModuleNotFoundError(f"{__name__} needs Lightning: pip install lightning", name=names[0])


_trainer: Any = _installed("lightning.pytorch", "pytorch_lightning")
_fabric: Any = _installed("lightning.fabric.strategies", "lightning_fabric.strategies")


class _Compressions:
    """The compressed models of a strategy, and their residuals beside its checkpoints (:mod:`.lightning_files`)."""

    def __init__(
        self, policy: Policy | str, seed: int, without_residuals: bool, settings: Mapping[str, Any]
    ) -> None:
        own = sorted(set(settings) & set(_OWN))
        if own:
            raise UnsupportedError(
                f"{', '.join(own)}: the strategy gives DistributedDataParallel its hook and its group itself; leave it out, "
                "or take Lightning's DDPStrategy"
            )
        self.policy = load(policy)
        self._seed = seed
        self._without_residuals = without_residuals
        self.models: list[DdpCompression] = []

    def add(self, model: Any, precision: Any) -> None:
        """Compress a DistributedDataParallel. precision: Lightning's plugin, which may hold a loss scaler."""
        scaler = getattr(precision, "scaler", None)
        group = gradient_group(model, self.policy, seed=self._seed)
        scale = scaler.get_scale if scaler is not None else None
        self.models.append(compress_ddp(model, group=group, scale=scale))

    def clear(self) -> None:
        """Forget models that are trained no more. All ranks call it."""
        for model in self.models:
            dist.destroy_process_group(model.group)
        self.models.clear()

    def stats(self) -> Stats:
        return Stats(tuple(message for model in self.models for message in stats(model.group).messages))

    def save(self, strategy: Any, path: lightning_files.Path, storage_options: Any) -> dict[str, Any]:
        """Write this rank's file for a checkpoint; what belongs into the checkpoint. All ranks call it."""
        if not self.models:
            return {}
        mark = lightning_files.Mark(
            strategy.broadcast(uuid.uuid4().hex), strategy.world_size, str(self.policy)
        )
        strategy.checkpoint_io.save_checkpoint(
            lightning_files.contents(mark, [model.state_dict() for model in self.models]),
            lightning_files.rank_path(path, strategy.global_rank),
            storage_options=storage_options,
        )
        strategy.barrier()  # where the checkpoint is, the files are
        return {lightning_files.KEY: asdict(mark)}

    def resume(self, strategy: Any, path: lightning_files.Path, checkpoint: Mapping[str, Any]) -> None:
        """Go on with the residuals of a checkpoint, if it has any. Raises CheckpointError for what cannot be."""
        saved = checkpoint.get(lightning_files.KEY)
        if saved is None or self._without_residuals:
            return
        states = lightning_files.read(
            path,
            saved,
            strategy.global_rank,
            strategy.world_size,
            str(self.policy),
            strategy.checkpoint_io.load_checkpoint,
        )
        if len(states) != len(self.models):
            raise CheckpointError(
                f"{path} has residuals of {len(states)} models, and {len(self.models)} are set up: set up the same models "
                "in the same order first, or begin with none: resume_without_residuals=True"
            )
        for model, state in zip(self.models, states, strict=True):
            model.load_state_dict(state)

    def remove(self, strategy: Any, path: lightning_files.Path) -> None:
        strategy.checkpoint_io.remove_checkpoint(lightning_files.rank_path(path, strategy.global_rank))

    def lines(self) -> list[str]:
        """What was sent, one line for each kind of message that was compressed, or that nothing was."""
        head = f"thinwire, policy {self.policy.name}: "
        return [
            f"{head}{m.op} of {m.role}s as {m.codec}, {m.calls} calls, {m.raw_bytes / 1e6:.2f} MB raw, "
            f"{m.wire_bytes / 1e6:.2f} MB sent by this rank ({m.ratio:.2f} times smaller)"
            for m in self.stats().messages
            if m.compressed
        ] or [f"{head}nothing was compressed"]


class _Compressed:
    """A strategy of DDP's with compressions."""

    def __init__(
        self,
        policy: Policy | str = "balanced",
        *,
        seed: int = 0,
        resume_without_residuals: bool = False,
        **kwargs: Any,
    ) -> None:
        self.compressions = _Compressions(policy, seed, resume_without_residuals, kwargs)
        super().__init__(**kwargs)


class ThinwireStrategy(_Compressed, _trainer.strategies.DDPStrategy):  # type: ignore[misc]  # of a package that need not be there
    """Lightning's DDPStrategy with compressed gradients.

    policy: a Policy, a preset's name or a TOML file; its axis ``dp`` says what gradients get. seed: of stochastic
    rounding. resume_without_residuals: a resumed run begins with none; False: it goes on with the checkpoint's, which makes
    it exact, and which needs as many ranks and the same policy. kwargs: DDPStrategy's.

    ``compressions.stats()`` is what was sent; the trainer's loggers get it every ``log_every_n_steps`` steps, by the names
    of :meth:`thinwire.Stats.scalars`. A loss scaler is that of the precision plugin. Raises SpecError for an unknown policy,
    UnsupportedError for a hook or a group of the caller's.
    """

    strategy_name = "thinwire"
    _loaded_path: lightning_files.Path = ""
    _logged = 0

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.compressions.clear()  # of a fit before this one
        self.compressions.add(self.model, self.precision_plugin)
        self._logged = 0

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: lightning_files.Path, storage_options: Any = None
    ) -> None:
        if "optimizer_states" in checkpoint:  # not in one of weights alone
            checkpoint |= self.compressions.save(self, filepath, storage_options)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: lightning_files.Path, *args: Any, **kwargs: Any) -> Any:
        self._loaded_path = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self.compressions.resume(self, self._loaded_path, checkpoint)

    def remove_checkpoint(self, filepath: lightning_files.Path) -> None:
        super().remove_checkpoint(filepath)
        self.compressions.remove(self, filepath)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        trainer = self.lightning_module.trainer
        every, step = trainer.log_every_n_steps, trainer.global_step
        if every and step % every == 0 and step != self._logged:  # steps may be of several batches
            self._log(trainer)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._log(self.lightning_module.trainer)
        for line in self.compressions.lines():
            _trainer.utilities.rank_zero_info(line)

    def _log(self, trainer: Any) -> None:
        self._logged = trainer.global_step
        for logger in trainer.loggers:
            logger.log_metrics(self.compressions.stats().scalars(), step=trainer.global_step)


class ThinwireFabricStrategy(_Compressed, _fabric.DDPStrategy):  # type: ignore[misc]  # of a package that need not be there
    """Fabric's DDPStrategy with compressed gradients: ``Fabric(strategy=ThinwireFabricStrategy(policy="balanced"))``.

    Arguments and errors are those of :class:`ThinwireStrategy`. ``fabric.save`` writes residuals beside its file;
    ``fabric.load(path, state)`` with a dict of what is set up already reads them. Nothing is logged by itself:
    ``fabric.log_dict(fabric.strategy.compressions.stats().scalars())``.
    """

    def setup_module(self, module: Any) -> Any:
        model = super().setup_module(module)
        self.compressions.add(model, self.precision)
        return model

    def save_checkpoint(
        self,
        path: lightning_files.Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,
    ) -> None:
        state = {**state, **self.compressions.save(self, path, storage_options)}
        super().save_checkpoint(path, state, storage_options, filter)

    def load_checkpoint(
        self, path: lightning_files.Path, state: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        remainder: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        if isinstance(state, dict) and state:
            self.compressions.resume(self, path, remainder)
            remainder.pop(lightning_files.KEY, None)
        return remainder
