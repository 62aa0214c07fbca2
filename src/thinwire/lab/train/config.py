"""The frozen settings of a training run, also from TOML."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from thinwire.errors import SpecError, nearest
from thinwire.integrate.degrees import ShardingDegrees

from .layout import Layout, check_layout
from .model import ModelConfig
from .pipeline import SCHEDULES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Config = TypeVar("_Config", bound="DataclassInstance")

PRECISIONS = ("fp32", "bf16", "fp16")


def _require(what: str, value: object, ok: bool, limit: str) -> None:
    if not ok:
        raise SpecError(f"{what}={value!r}: {limit}")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay to ``min_lr``. clip: global gradient norm, 0 for none."""

    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclass(frozen=True)
class LossScaleConfig:
    """Dynamic loss scale of fp16: halved by an overflow, doubled after ``interval`` steps without one."""

    initial: float = 2.0**16
    interval: int = 1000


@dataclass(frozen=True)
class DataConfig:
    """Training text.

    paths: files or folders of text; none means the sources of Python's standard library. tokens: "byte" (256 of
    them) or "bpe" (trained on the text, as many as the model's vocab). max_bytes: text past this is left out.
    validation: share of the text that is held out.
    """

    paths: tuple[str, ...] = ()
    tokens: str = "byte"
    max_bytes: int = 16 << 20
    validation: float = 0.05

    def __post_init__(self) -> None:
        _require("data.tokens", self.tokens, self.tokens in ("byte", "bpe"), "must be 'byte' or 'bpe'")
        _require("data.validation", self.validation, 0 < self.validation < 1, "must be between 0 and 1")


@dataclass(frozen=True)
class TrainConfig:
    """All that decides a run's numbers.

    schedule: of the pipeline, a key of ``SCHEDULES``; of no effect with pp=1. zero: 0 replicas, 1 sharded optimizer
    state, 2 and 3 FSDP2 with gradients and then parameters sharded too. ddp: replicas under PyTorch's
    ``DistributedDataParallel`` instead of buckets of our own; with zero = 0. degrees: how parameters, gradients and
    optimizer state are cut, instead of a stage (in TOML ``zero = {params = 2, grads = 4, optim = 8}``). precision: of
    parameters and compute; masters, gradient sums and the optimizer are fp32 always. steps: length of the learning-rate
    schedule.
    global_batch, micro_batch: sequences. eval_batches: global batches of held-out text in one evaluation.
    """

    model: ModelConfig = field(default_factory=lambda: ModelConfig.preset("lab"))
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    seed: int = 0
    steps: int = 100
    global_batch: int = 8
    micro_batch: int = 2
    schedule: str = "1f1b"
    zero: int = 1
    ddp: bool = False
    degrees: ShardingDegrees | None = None
    precision: str = "fp32"
    bucket_bytes: int = 4 << 20
    eval_batches: int = 4

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise SpecError(f"unknown schedule {self.schedule!r}: {nearest(self.schedule, SCHEDULES)}")
        _require("zero", self.zero, self.zero in (0, 1, 2, 3), "must be 0, 1, 2 or 3")
        _require("ddp", self.ddp, not (self.ddp and self.zero), f"needs zero = 0, not {self.zero}")
        _require("ddp", self.ddp, not (self.ddp and self.degrees), f"does not go with degrees {self.degrees}")
        _require("precision", self.precision, self.precision in PRECISIONS, f"must be one of {PRECISIONS}")
        for name in ("steps", "global_batch", "micro_batch", "bucket_bytes", "eval_batches"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "must be at least 1")
        if self.data.tokens == "byte":
            _require("model.vocab", self.model.vocab, self.model.vocab >= 256, "bytes need at least 256")

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step and data-parallel rank."""
        return self.global_batch // (self.layout.dp * self.micro_batch)

    @property
    def stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.layout.pp * (SCHEDULES[self.schedule].stages_per_rank if self.layout.pp > 1 else 1)

    def check(self, world: int) -> None:
        """Raise LayoutError if this cannot run on ``world`` ranks."""
        check_layout(self, world)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be resumed bit for bit (JSON types only)."""
        record = dataclasses.asdict(self)
        del record["steps"], record["eval_batches"]
        return _plain(record)  # type: ignore[no-any-return]

    @classmethod
    def from_toml(cls, text: str) -> TrainConfig:
        """Read settings named as the fields here; ``layout = "dp=2,tp=2"``, ``[model]`` may start from ``preset``.

        Raises SpecError for text that is not TOML, an unknown name or a wrong type; LayoutError for the layout.
        """
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as e:
            raise SpecError(f"settings are not TOML: {e}") from None
        if isinstance(table.get("layout"), str):
            table["layout"] = Layout.parse(table["layout"])
        base = cls()
        if isinstance(table.get("zero"), dict):
            base = dataclasses.replace(base, degrees=ShardingDegrees.from_table(table.pop("zero")))
        if isinstance(table.get("model"), dict):
            base = dataclasses.replace(base, model=ModelConfig.preset(table["model"].pop("preset", "lab")))
        return _changed(base, table, "")

    @classmethod
    def from_file(cls, path: str | Path) -> TrainConfig:
        """``from_toml`` of a file."""
        return cls.from_toml(Path(path).read_text(encoding="utf-8"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value


def _changed(base: _Config, table: dict[str, Any], prefix: str) -> _Config:
    """``base`` with the settings of a TOML table, names and types checked."""
    known = {f.name for f in dataclasses.fields(base)}
    changes = {}
    for name, value in table.items():
        if name not in known:
            raise SpecError(f"unknown setting {prefix}{name}: {nearest(name, known)}")
        current = getattr(base, name)
        if dataclasses.is_dataclass(current) and isinstance(value, dict):
            value = _changed(current, value, f"{prefix}{name}.")  # type: ignore[type-var]
        elif isinstance(current, tuple) and isinstance(value, list):
            value = tuple(value)
        elif isinstance(current, float) and type(value) is int:
            value = float(value)
        if type(value) is not type(current):
            raise SpecError(f"{prefix}{name} = {value!r} is not a {type(current).__name__}")
        changes[name] = value
    return dataclasses.replace(base, **changes)
