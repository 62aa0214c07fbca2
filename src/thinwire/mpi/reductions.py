"""Types and operations of MPI for those of PyTorch.

MPI has no 16-bit floats. For them a sum (product, minimum, maximum) is an operation of our own, in PyTorch: it rounds to the
dtype after each addition, in the order in which MPI adds, as gloo does in its own order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UnsupportedError
from .library import load

_HALVES = (torch.float16, torch.bfloat16)
_NAMES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.bool: "C_BOOL",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.float16: "UINT16_T",
    torch.bfloat16: "UINT16_T",
}
_BY_SIZE = {1: "BYTE", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}
_SUM, _AVG, _MIN, _MAX, _PRODUCT = (
    dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT,
)  # fmt: skip
_OPS = (
    (_SUM, "SUM", "LOR"),
    (_AVG, "SUM", None),
    (_MIN, "MIN", "LAND"),
    (_MAX, "MAX", "LOR"),
    (_PRODUCT, "PROD", "LAND"),
    (dist.ReduceOp.BAND, "BAND", "LAND"),
    (dist.ReduceOp.BOR, "BOR", "LOR"),
    (dist.ReduceOp.BXOR, "BXOR", "LXOR"),
)
"""PyTorch's operation, MPI's, and MPI's for truth values."""


def moved(dtype: torch.dtype) -> Any:
    """An MPI type of the dtype's size, for messages that are moved as they are."""
    return getattr(load(), _BY_SIZE[dtype.itemsize])


def reduced(dtype: torch.dtype, op: Any) -> tuple[Any, Any]:
    """MPI's type and operation for a reduction. AVG is SUM here: the caller divides.

    Raises UnsupportedError for what MPI cannot reduce.
    """
    MPI = load()
    name = _NAMES.get(dtype)
    # ReduceOp compares with a member by ==, but not from the member's side.
    found = next(((mpi, truth) for torch_op, mpi, truth in _OPS if op == torch_op), None)
    if name is None or found is None:
        raise UnsupportedError(
            f"backend mpi cannot reduce {dtype} by {op}; it has {', '.join(str(d).removeprefix('torch.') for d in _NAMES)}, "
            "and SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR and BXOR"
        )
    chosen = found[1] if dtype == torch.bool else found[0]
    if chosen is None or (chosen.startswith("B") and (dtype.is_floating_point or dtype.is_complex)):
        raise UnsupportedError(f"backend mpi cannot reduce {dtype} by {op}")
    if dtype in _HALVES:
        return getattr(MPI, name), _half(dtype, chosen)
    return getattr(MPI, name), getattr(MPI, chosen)


def divide(x: torch.Tensor, op: Any, size: int) -> None:
    """The end of an average: after the sum, in place."""
    if op == _AVG:
        x.div_(size) if x.is_floating_point() or x.is_complex() else x.div_(size, rounding_mode="trunc")


@cache
def _half(dtype: torch.dtype, name: str) -> Any:
    combine: Any = {"SUM": torch.add, "PROD": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}[name]

    def reduce(inp: Any, inout: Any, _: Any) -> None:
        if len(inp):
            theirs, ours = (torch.frombuffer(memoryview(b), dtype=dtype) for b in (inp, inout))
            combine(theirs, ours, out=ours)

    return load().Op.Create(reduce, commute=True)
