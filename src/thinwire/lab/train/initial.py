"""Initial parameters: the same for every layout."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def full_parameter(name: str, shape: tuple[int, ...], std: float | None, seed: int) -> Tensor:
    """The full parameter before it is split, fp32: a function of (seed, name) alone.

    std: of a normal distribution around zero; 0 gives zeros, None ones.
    """
    if std is None:
        return torch.ones(shape)
    if std == 0:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
