"""GPT-NeoX: rotary embedding, attention and MLP side by side, one tensor-parallel reduction per block.

A block computes ``x + attention(norm1(x)) + mlp(norm2(x))``. Its heads and its MLP columns are split over the tp
axis; the partial outputs of both are added before they are reduced, so that a block costs one all-reduce forward
and one backward. (Black et al., "GPT-NeoX-20B", 2022, section 2.1.)

Parameters that tp does not split (norms, output biases) enter the computation as each rank's share, so their
gradients are partial on every tp rank and are summed over tp once per step: see ``Stage.shards``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.errors import SpecError, nearest

from .initial import full_parameter
from .tensor_parallel import TensorAxis


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a GPT-NeoX model. rotary_pct: share of a head's dimensions that the rotary embedding turns."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocab: int
    rotary_pct: float = 0.25
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocab"):
            if getattr(self, name) < 1:
                raise SpecError(f"model.{name}={getattr(self, name)}: must be at least 1")
        if self.hidden % self.heads:
            raise SpecError(f"model.hidden={self.hidden} is not a multiple of heads={self.heads}")

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def rotary_size(self) -> int:
        """Dimensions of a head that are turned: even."""
        return int(self.head_size * self.rotary_pct) // 2 * 2

    @classmethod
    def preset(cls, name: str, **changes: int | float) -> ModelConfig:
        """A named size, with fields changed. Raises SpecError for an unknown name."""
        if name not in PRESETS:
            raise SpecError(f"unknown model {name!r}: {nearest(name, PRESETS)}")
        return dataclasses.replace(PRESETS[name], **changes)  # type: ignore[arg-type]


PRESETS = {
    "tiny": ModelConfig(layers=4, hidden=32, heads=4, sequence=16, vocab=256, rotary_pct=0.5),
    "lab-small": ModelConfig(layers=4, hidden=128, heads=4, sequence=64, vocab=256),
    "lab": ModelConfig(layers=4, hidden=256, heads=4, sequence=64, vocab=256),
    "lab-large": ModelConfig(layers=4, hidden=512, heads=8, sequence=64, vocab=256),
    "small": ModelConfig(layers=12, hidden=768, heads=12, sequence=2048, vocab=50432),
    "medium": ModelConfig(layers=24, hidden=1024, heads=16, sequence=2048, vocab=50432),
    "large": ModelConfig(layers=24, hidden=1536, heads=16, sequence=2048, vocab=50432),
    "xl": ModelConfig(layers=24, hidden=2048, heads=16, sequence=2048, vocab=50432),
    "2.7b": ModelConfig(layers=32, hidden=2560, heads=32, sequence=2048, vocab=50432),
    "6.7b": ModelConfig(layers=32, hidden=4096, heads=32, sequence=2048, vocab=50432),
    "13b": ModelConfig(layers=40, hidden=5120, heads=40, sequence=2048, vocab=50432),
    "neox-20b": ModelConfig(layers=44, hidden=6144, heads=64, sequence=2048, vocab=50432),
}
"""Sizes by name, smallest first. ``lab`` is the one that two cores can step in about 200 ms for eight ranks."""


@dataclass(frozen=True)
class Slot:
    """A parameter: its full shape and how it starts. split: the dimension that tp splits, None for none.

    std: of a normal distribution around zero; None for all ones (a norm's weight); 0 for zeros.
    """

    shape: tuple[int, ...]
    split: int | None
    std: float | None


def block_slots(config: ModelConfig) -> dict[str, Slot]:
    """Parameters of one block, by name; linear weights are (out, in)."""
    h = config.hidden
    small = (2 / (5 * h)) ** 0.5  # Nguyen and Salazar 2019
    output = 2 / (config.layers * h**0.5)  # Wang and Komatsuzaki 2021 (GPT-J)
    return {
        "norm1.weight": Slot((h,), None, None),
        "norm1.bias": Slot((h,), None, 0.0),
        "norm2.weight": Slot((h,), None, None),
        "norm2.bias": Slot((h,), None, 0.0),
        "qkv.weight": Slot((3 * h, h), 0, small),  # rows: head by head, in a head q, k, v
        "qkv.bias": Slot((3 * h,), 0, 0.0),
        "dense.weight": Slot((h, h), 1, output),
        "dense.bias": Slot((h,), None, 0.0),
        "up.weight": Slot((4 * h, h), 0, small),
        "up.bias": Slot((4 * h,), 0, 0.0),
        "down.weight": Slot((h, 4 * h), 1, output),
        "down.bias": Slot((h,), None, 0.0),
    }


def embedding_slots(config: ModelConfig) -> dict[str, Slot]:
    """Parameters before the blocks."""
    return {"weight": Slot((config.vocab, config.hidden), 0, (2 / (5 * config.hidden)) ** 0.5)}


def head_slots(config: ModelConfig) -> dict[str, Slot]:
    """Parameters after the blocks."""
    h = config.hidden
    return {
        "norm.weight": Slot((h,), None, None),
        "norm.bias": Slot((h,), None, 0.0),
        "output.weight": Slot((config.vocab, h), 0, (2 / (5 * h)) ** 0.5),
    }


class _Part(nn.Module):
    """A module whose parameters are this tp rank's slices of ``slots``; ``self.p("up.bias")`` is one of them."""

    def __init__(
        self, name: str, slots: dict[str, Slot], tp: TensorAxis, seed: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.tp = tp
        self.slots = slots
        for key, slot in slots.items():
            full = full_parameter(f"{name}.{key}", slot.shape, slot.std, seed)
            self.register_parameter(_attribute(key), nn.Parameter(tp.slice(full, slot.split).to(dtype)))

    def p(self, key: str) -> Tensor:
        parameter: Tensor = getattr(self, _attribute(key))
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _attribute(key: str) -> str:
    return key.replace(".", "_")


class Embedding(_Part):
    """Token embedding, the vocabulary split over tp: tokens (batch, sequence) int64 -> (batch, sequence, hidden)."""

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.p("weight")
        if self.tp.size == 1:
            return F.embedding(tokens, weight)
        row = tokens - self.tp.rank * len(weight)
        mine = (row >= 0) & (row < len(weight))
        return self.tp.leave(F.embedding(row * mine, weight) * mine.unsqueeze(-1))


class Block(_Part):
    """One layer: (batch, sequence, hidden) -> the same."""

    def __init__(self, name: str, config: ModelConfig, tp: TensorAxis, seed: int, dtype: torch.dtype) -> None:
        super().__init__(name, block_slots(config), tp, seed, dtype)
        self.config = config

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        entered = self.tp.enter(x)
        partial = self._attention(self._norm("norm1", entered), turn) + self._mlp(
            self._norm("norm2", entered)
        )
        return x + self.tp.leave(partial)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.p(f"{name}.weight"), self.p(f"{name}.bias")
        return F.layer_norm(x, weight.shape, weight, bias, self.config.norm_eps)

    def _attention(self, x: Tensor, turn: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        qkv = F.linear(x, self.p("qkv.weight"), self.p("qkv.bias"))
        qkv = qkv.view(batch, sequence, -1, 3, self.config.head_size).permute(3, 0, 2, 1, 4)
        q, k = rotate(qkv[:2], turn).unbind(0)
        heads = F.scaled_dot_product_attention(q, k, qkv[2], is_causal=True)
        return F.linear(
            heads.transpose(1, 2).reshape(batch, sequence, -1),
            self.p("dense.weight"),
            self._share("dense.bias"),
        )

    def _mlp(self, x: Tensor) -> Tensor:
        up = F.linear(x, self.p("up.weight"), self.p("up.bias"))
        return F.linear(F.gelu(up), self.p("down.weight"), self._share("down.bias"))

    def _share(self, name: str) -> Tensor:
        """What this tp rank adds of an output bias, so that the sum over tp has it once.

        The two biases are not added to each other first: their gradients would be one tensor, to which
        zero-bubble schedules, adding micro-batches in place, would add twice.
        """
        return self.p(name) / self.tp.size


class Head(_Part):
    """Final norm and output layer: (batch, sequence, hidden) -> logits of this tp rank's part of the vocabulary."""

    def __init__(self, name: str, config: ModelConfig, tp: TensorAxis, seed: int, dtype: torch.dtype) -> None:
        super().__init__(name, head_slots(config), tp, seed, dtype)
        self.eps = config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.p("norm.weight")
        x = F.layer_norm(self.tp.enter(x), weight.shape, weight, self.p("norm.bias"), self.eps)
        return F.linear(x, self.p("output.weight"))


class Stage(nn.Module):
    """The layers ``layers`` of a model; the first stage takes tokens, the last gives logits.

    shards: parameter name -> dimension that tp splits; None where tp ranks hold copies, whose gradients are
    partial on each tp rank. Names do not depend on the layout.
    """

    turn: Tensor

    def __init__(
        self, config: ModelConfig, layers: Iterable[int], tp: TensorAxis, seed: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        layers = list(layers)
        self.embedding = (
            Embedding("embedding", embedding_slots(config), tp, seed, dtype) if 0 in layers else None
        )
        self.blocks = nn.ModuleDict({str(i): Block(f"blocks.{i}", config, tp, seed, dtype) for i in layers})
        self.head = Head("head", config, tp, seed, dtype) if config.layers - 1 in layers else None
        self.register_buffer("turn", rotary_table(config).to(dtype), persistent=False)
        self.shards = {
            f"{name}.{_attribute(key)}": slot.split
            for name, part in self.named_modules()
            if isinstance(part, _Part)
            for key, slot in part.slots.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, self.turn)
        return self.head(x) if self.head is not None else x


def rotary_table(config: ModelConfig) -> Tensor:
    """Cosines and sines, fp32 (2, sequence, rotary_size), of position times 10000^(-2i/rotary_size).

    (Su et al. 2021, equation 15; the two halves of the turned dimensions are the pairs, as in GPT-NeoX.)
    """
    size = config.rotary_size
    frequency = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / max(size, 1))
    angle = torch.outer(torch.arange(config.sequence, dtype=torch.float64), frequency).repeat(1, 2)
    sine = angle.sin()
    sine[:, : size // 2].neg_()  # so that rotating is x * cos + swap(x) * sin
    return torch.stack([angle.cos(), sine]).float()


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the first dimensions of heads: x (..., sequence, head_size), turn from ``rotary_table``."""
    size = turn.shape[-1]
    head, tail = x[..., :size], x[..., size:]
    swapped = torch.cat([head[..., size // 2 :], head[..., : size // 2]], dim=-1)
    return torch.cat([head * turn[0] + swapped * turn[1], tail], dim=-1)
