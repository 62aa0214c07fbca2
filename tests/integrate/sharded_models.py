"""Models and steps that tests of cut state share; ranks import it by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from support import gaussian
from thinwire import Ladder, Policy, ShardedModel, Sharding, ShardingDegrees


def chains(world: int) -> Iterator[ShardingDegrees]:
    """All degrees that nest, without a secondary copy."""
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    for optim in divisors:
        for grads in (d for d in divisors if optim % d == 0):
            for params in (d for d in divisors if grads % d == 0):
                yield ShardingDegrees(params, grads, optim)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, one that is used by some ranks only in some micro-batches, and parameters outside of any block."""

    def __init__(self, width: int = 16, layers: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(width))
        self.sometimes = nn.Parameter(torch.ones(width))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.to(dtype)

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale * self.frozen + (self.sometimes if extra else 0)


class Exact(nn.Module):
    """Two linear layers without anything between: gradients of small integers are small integers, whose sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randint(-2, 3, p.shape))

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch(rank: int, step: int, micro: int, net: nn.Module) -> Tensor:
    seed = 100 * step + 10 * rank + micro
    if isinstance(net, Exact):
        return torch.randint(-2, 3, (3, 7), generator=torch.Generator().manual_seed(seed)).float()
    width = net.frozen.numel()  # type: ignore[operator]
    return gaussian(seed, 4 * width).view(4, width).to(net.frozen.dtype)  # type: ignore[union-attr]


def loss_of(net: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    out = net(batch(rank, step, micro, net), extra=rank == 0 and micro == 0)
    return out.sum() if isinstance(net, Exact) else (out.float() - 0.3).square().mean()


def cut(
    net: nn.Module,
    degrees: ShardingDegrees,
    policy: Policy | str = "none",
    inside: Policy | str | None = None,
    *,
    ranks_per_host: int | None = None,
    **options: Any,
) -> ShardedModel:
    scheme = Sharding.of(degrees, policy, inside)
    ladder = Ladder(scheme, ranks_per_host=ranks_per_host)
    return ShardedModel(net, ladder, list(net.blocks), **options)  # type: ignore[arg-type]


def backward(
    model: ShardedModel, net: nn.Module, rank: int, step: int, micros: int = 2, scale: float = 1.0
) -> float:
    model.start(scale)
    total = 0.0
    for micro in range(micros):
        loss = loss_of(net, rank, step, micro)
        (loss * scale).backward()
        total += loss.item()
    model.finish()
    return total


def sgd(model: ShardedModel, lr: float) -> None:
    with torch.no_grad():
        for master in model.masters():
            assert master.grad is not None
            master.sub_(master.grad, alpha=lr)
    model.commit()


def plain_step(net: nn.Module, world: int, step: int, lr: float, micros: int = 2) -> float:
    """All ranks' gradients in one process: the mean over ranks of the sums over micro-batches. Rank 0's loss."""
    net.zero_grad()
    own = 0.0
    for rank in range(world):
        for micro in range(micros):
            loss = loss_of(net, rank, step, micro)
            loss.backward()
            own += loss.item() if rank == 0 else 0.0
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p.sub_(p.grad.div_(world), alpha=lr)
    return own
