"""What the operations of a group need of tensors: sizes, flat views, parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..collectives.frames import equal_parts
from ..errors import UnsupportedError


class flat_view:
    """A contiguous flat view of a tensor to write into; a non-contiguous tensor gets the result on exit."""

    def __init__(self, x: Tensor) -> None:
        self._x = x.detach()
        self._flat = self._x.contiguous().view(-1)

    def __enter__(self) -> Tensor:
        return self._flat

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and not self._x.is_contiguous():
            self._x.copy_(self._flat.view_as(self._x))


def nbytes_of(x: Tensor) -> int:
    return x.numel() * x.element_size()


def check_share(op: str, share: Tensor, whole: Tensor, size: int) -> None:
    if share.numel() * size != whole.numel():
        raise UnsupportedError(
            f"{op} among {size} ranks: {share.numel()} values per rank do not make {whole.numel()} in all"
        )


def split_rows(flat: Tensor, like: Tensor, splits: Sequence[int], size: int) -> list[Tensor]:
    """Cut a flat tensor by splits along the first dimension of ``like``; no splits: equal parts."""
    if not splits:
        return equal_parts(flat, size)
    row = like.numel() // like.shape[0] if like.shape[0] else 0
    return list(torch.split(flat, [n * row for n in splits]))
