"""Which parameters FSDP2 sends as one message, and where the values of each lie in it.

The one place that reads what PyTorch keeps to itself: its hooks see flat tensors only. Of torch 2.11 to 2.13.

The input of a reduce-scatter is a matrix with a row for each rank. In a row lie, one after the other, that rank's parts of
the gradients. A gradient is cut along dimension 0 into parts of equal size, so its values are in their own order when its
columns are read row by row; zeros fill up the last ones. (A parameter that is sharded along another dimension is put
into that order first; its gradient divides evenly.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..errors import UnsupportedError
from ..group import ThinwireGroup
from .reductions import feedback_group


@dataclass(frozen=True)
class Member:
    """A parameter of a unit.

    name: in the model. numel: of its gradient, before FSDP cuts it. share: values of each rank's part, zeros included.
    """

    name: str
    numel: int
    share: int
    fsdp: Any

    @property
    def trained(self) -> bool:
        return bool(self.fsdp.sharded_param.requires_grad)


@dataclass(frozen=True)
class Unit:
    """What one call of ``fully_shard`` made: its parameters are gathered and their gradients reduced together.

    group: the ranks that parameters are cut over. replicas: those that have the same part of them, on a mesh of two
    dimensions (HSDP). dtype: of its gradients' messages.
    """

    index: int
    name: str
    module: FSDPModule
    group: ThinwireGroup
    replicas: ThinwireGroup | None
    members: tuple[Member, ...]
    dtype: torch.dtype
    device: torch.device
    param_group: Any

    def takes_views(self, dtype: torch.dtype) -> bool:
        """Whether FSDP only keeps views of a mean gradient of this dtype until the backward pass ends, and reads none of it.

        It reads what it adds to an earlier gradient, casts, moves, reduces once more, or shows a hook.
        """
        return (
            self.device.type == "cpu"
            and self.replicas is None
            and self.param_group._all_reduce_hook is None
            and all(
                member.fsdp.orig_dtype == dtype
                and not member.fsdp.offload_to_cpu
                and member.fsdp.sharded_param.grad is None
                and not getattr(member.fsdp.sharded_param, "_post_accumulate_grad_hooks", None)
                for member in self.trained()
            )
        )

    def trained(self) -> tuple[Member, ...]:
        """The parameters whose gradients are in a message, in their order, if all of them have one."""
        return tuple(member for member in self.members if member.trained)


def units_of(model: nn.Module) -> list[Unit]:
    """The units of a model whose parameters are sharded.

    Raises UnsupportedError if there are none, or one is over another group than thinwire's, of several meshes,
    or replicated without being cut.
    """
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    for _, module in modules:
        module.reshard()  # so that parameters have their names
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    units: list[Unit] = []
    seen: set[int] = set()
    for name, module in modules:
        state: Any = module._get_fsdp_state()
        if id(state) in seen:  # fully_shard([a, b]) is one unit
            continue
        seen.add(id(state))
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        if len(groups) > 1:
            raise UnsupportedError(
                f"FSDP unit {_shown(name)} has parameters on {len(groups)} meshes (shard_placement_fn), compress_fsdp takes "
                "one; call fully_shard on the modules of each mesh by themselves"
            )
        for param_group in groups:
            units.append(_unit(len(units), _shown(name), module, param_group, names))
    if not units:
        raise UnsupportedError(
            "compress_fsdp found no sharded parameters: call torch.distributed.fsdp.fully_shard on the model first"
        )
    return units


def columns(message: Tensor, members: Iterable[Member], ranks: int) -> Iterator[Tensor]:
    """Each parameter's part of a flat message of gradients: a view (ranks, share)."""
    rows, begin = message.view(ranks, -1), 0
    for member in members:
        yield rows[:, begin : begin + member.share]
        begin += member.share


def put(part: Tensor, values: Tensor) -> None:
    """Copy a parameter's flat values to its part of a message, and leave the rest of it as it is."""
    for target, source in _pieces(part, values):
        target.copy_(source)


def take(part: Tensor, values: Tensor) -> None:
    """Copy a parameter's part of a message to its flat values."""
    for source, target in _pieces(part, values):
        target.copy_(source)


def _pieces(part: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the same values in both: the full rows, and the row that ends the parameter."""
    share = part.shape[1]
    full = values.numel() // share if share else 0
    if full:
        yield part[:full], values[: full * share].view(full, share)
    rest = values[full * share :]
    if rest.numel():
        yield part[full, : rest.numel()], rest


def _unit(index: int, name: str, module: FSDPModule, param_group: Any, names: dict[int, str]) -> Unit:
    mesh = param_group.mesh_info
    group, replicas = (
        feedback_group(
            found,
            "compress_fsdp",
            f"thinwire groups, that of FSDP unit {name}",
            "give fully_shard a mesh of thinwire.init_mesh",
        )
        if found is not None
        else None
        for found in (mesh.shard_process_group, getattr(mesh, "replicate_process_group", None))
    )
    assert group is not None
    if replicas is not None and group.size() == 1:
        raise UnsupportedError(
            f"FSDP unit {name} is cut over 1 rank and replicated over {replicas.size()}: FSDP2 only all-reduces its "
            "gradients then; use DistributedDataParallel with thinwire.compress_ddp, or shard over 2 ranks or more"
        )
    members = []
    for fsdp in param_group.fsdp_params:
        parameter_name = names.get(id(fsdp.sharded_param))
        if parameter_name is None:
            raise UnsupportedError(
                f"FSDP unit {name} has parameters outside of the model; give compress_fsdp the module that contains all of "
                "them"
            )
        share = fsdp.padded_sharded_param_size.numel()
        members.append(Member(parameter_name, fsdp._orig_size.numel(), share, fsdp))
    precision = param_group.mp_policy
    first = next((m for m in members if m.trained), members[0])  # all that are trained have one dtype
    dtype = precision.reduce_dtype or precision.param_dtype or first.fsdp.sharded_param.dtype
    return Unit(index, name, module, group, replicas, tuple(members), dtype, param_group.device, param_group)


def _shown(name: str) -> str:
    return repr(name) if name else "(the model itself)"
