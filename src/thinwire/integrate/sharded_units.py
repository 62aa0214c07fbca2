"""Units of a model whose state is cut: each flattens its parameters into one tensor, which is there only when it is used.

What autograd has saved of a parameter shares the memory of the unit's flat tensor. So that memory is given back and taken
again under the same tensor, and between uses a parameter is an empty tensor: who uses one then gets an error of shapes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack

from ..errors import UnsupportedError
from .ladder import Ladder, Residuals, padded


@dataclass
class Member:
    """A parameter's place in its unit: elements [begin, end) of the flat tensor."""

    name: str
    parameter: nn.Parameter
    label: Hashable
    shape: torch.Size
    begin: int
    end: int


@dataclass
class Unit:
    """Parameters that are gathered and reduced together.

    numel: of the flat tensor, zeros at its end included. flat: all parameters, in their dtype. shard: this rank's part at
    the degree of params; ``flat`` itself if that is 1. copy: the part at the degree of secondary, between the two passes.
    master: fp32, the part at the degree of optim; ``shard`` itself where it is the same. grads: the sum over micro-batches,
    the part at the degree of grads. message: gradients of the backward pass that runs.
    """

    index: int
    name: str
    module: nn.Module
    members: list[Member]
    numel: int
    dtype: torch.dtype
    flat: Tensor
    shard: Tensor
    master: Tensor
    residuals: Residuals
    copy: Tensor | None = None
    grads: Tensor | None = None
    total: Tensor | None = None
    message: Tensor | None = None
    arrived: int = 0
    in_backward: bool = False
    whole: bool = False
    fetch: dist.Work | None = None
    works: list[dist.Work] = field(default_factory=list)  # reductions under way

    def allocate(self) -> None:
        """Take memory for the flat tensor."""
        self.flat.untyped_storage().resize_(self.numel * self.flat.element_size())

    def settle(self) -> bool:
        """Wait for a gather that is under way; whether there was one."""
        if self.fetch is None:
            return False
        self.fetch.wait()
        self.fetch = None
        return True

    def show(self) -> None:
        """The parameters are parts of the flat tensor, which holds their values."""
        for member in self.members:
            member.parameter.data = self.flat[member.begin : member.end].view(member.shape)
        self.whole = True

    def free(self) -> None:
        """Give the flat tensor's memory back."""
        for member in self.members:
            member.parameter.data = self.flat.new_empty(0)
        self.flat.untyped_storage().resize_(0)
        self.whole = False

    def memory(self) -> Tensor:
        """The flat tensor's memory under another tensor: what numpy has looked at cannot be given back."""
        return from_dlpack(self.flat)

    def segments(self, begin: int, length: int) -> Iterator[tuple[Hashable, int, int]]:
        """(label, begin, end) of this unit's labels in a part of ``length`` values from ``begin`` on, relative to it."""
        spans: dict[Hashable, tuple[int, int]] = {}
        for member in self.members:
            start = spans[member.label][0] if member.label in spans else member.begin
            spans[member.label] = start, member.end
        for label, (start, end) in spans.items():
            first, last = max(start, begin), min(end, begin + length)
            if first < last:
                yield label, first - begin, last - begin

    def cut(self, whole: Tensor) -> dict[str, Tensor]:
        """Parameters by name from a flat tensor of this unit; they share its memory."""
        return {m.name: whole[m.begin : m.end].view(m.shape) for m in self.members}

    def flatten(self, values: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """A flat tensor of this unit from parameters by name."""
        whole = torch.zeros(self.numel, dtype=dtype)
        for member in self.members:
            whole[member.begin : member.end].copy_(values[member.name].reshape(-1))
        return whole


def make_units(
    model: nn.Module,
    modules: Sequence[nn.Module],
    ladder: Ladder,
    labels: Callable[[str], Hashable],
    gradient_dtype: torch.dtype,
    rollback: bool,
) -> list[Unit]:
    """A unit for each of ``modules`` and one for what is left of ``model``, in the order of the model's modules.

    Raises UnsupportedError, naming the parameter or the unit, for what cannot be cut.
    """
    owners = {id(module) for module in modules}
    unknown = owners - {id(module) for module in model.modules()}
    if unknown:
        raise UnsupportedError("units: one of them is no module of the model")
    parts: dict[int, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    seen: dict[int, tuple[int, str]] = {}
    for name, parameter, owner in _walk(model, owners):
        if not parameter.requires_grad:
            continue
        _check(name, parameter)
        if id(parameter) in seen:
            other, first = seen[id(parameter)]
            if other != id(owner):
                raise UnsupportedError(
                    f"parameter {name} is {first}, too, of another unit: parameters that are shared must be in one unit"
                )
            continue
        seen[id(parameter)] = id(owner), name
        parts[id(owner)].append((name, parameter))
    units: list[Unit] = []
    for name, module in model.named_modules():
        if parts.get(id(module)):
            label_of = lambda item: labels(item[0])  # noqa: E731
            units.append(
                _unit(
                    len(units), name or "(the model itself)", module, parts[id(module)], ladder, label_of,
                    gradient_dtype, rollback,
                )
            )  # fmt: skip
    if not units:
        raise UnsupportedError("the model has no parameters to train: there is nothing to cut")
    return units


def _walk(model: nn.Module, owners: set[int]) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """(name, parameter, the module whose unit it is in), names of one parameter several times included."""

    def visit(
        module: nn.Module, prefix: str, owner: nn.Module
    ) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
        owner = module if id(module) in owners else owner
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield prefix + name, parameter, owner
        for name, child in module.named_children():
            yield from visit(child, f"{prefix}{name}.", owner)

    return visit(model, "", model)


def _check(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise UnsupportedError(
            f"parameter {name} is a DTensor: tensor parallelism and cut state do not go together"
        )
    if parameter.device.type != "cpu":
        raise UnsupportedError(f"parameter {name} is on {parameter.device}: cut state is on the CPU only")
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedError(f"parameter {name} is {parameter.dtype}: fp32, bf16 and fp16 can be cut")


@torch.no_grad()
def _unit(
    index: int,
    name: str,
    module: nn.Module,
    parameters: list[tuple[str, nn.Parameter]],
    ladder: Ladder,
    label_of: Callable[[tuple[str, nn.Parameter]], Hashable],
    gradient_dtype: torch.dtype,
    rollback: bool,
) -> Unit:
    dtypes = {parameter.dtype for _, parameter in parameters}
    if len(dtypes) > 1:
        raise UnsupportedError(
            f"unit {name} has parameters of {', '.join(sorted(map(str, dtypes)))}: one dtype for each unit; put the "
            "modules of each dtype into units of their own"
        )
    dtype, degrees = dtypes.pop(), ladder.degrees
    # One label after the other, so that each is one piece of any part.
    order = list(dict.fromkeys(map(label_of, parameters)))
    members, begin = [], 0
    for item in sorted(parameters, key=lambda item: order.index(label_of(item))):
        end = begin + item[1].numel()
        members.append(Member(item[0], item[1], label_of(item), item[1].shape, begin, end))
        begin = end
    numel = padded(begin, degrees.optim)
    flat = torch.zeros(numel, dtype=dtype)
    for member in members:
        flat[member.begin : member.end].copy_(member.parameter.reshape(-1))
    master = part_of(flat, ladder, degrees.optim).float().clone()
    if degrees.params == degrees.optim and dtype == torch.float32:
        shard = master
    else:
        shard = part_of(flat, ladder, degrees.params).clone()
    if degrees.params == 1:
        flat = shard
    residuals = ladder.residuals(name, numel, gradient_dtype, rollback=rollback)
    unit = Unit(index, name, module, members, numel, dtype, flat, shard, master, residuals)
    unit.show()
    return unit


def part_of(whole: Tensor, ladder: Ladder, degree: int) -> Tensor:
    """This rank's part of a flat tensor at a degree: a view."""
    length = whole.numel() // degree
    begin = ladder.begin(whole.numel(), degree)
    return whole[begin : begin + length]


def digest(tensors: Iterable[Tensor]) -> bytes:
    """SHA-256 of the tensors' bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return found.digest()


def wait(works: list[dist.Work]) -> None:
    """Wait for all of them; none is left."""
    while works:
        works.pop(0).wait()
