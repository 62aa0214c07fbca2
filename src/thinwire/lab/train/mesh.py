"""From a layout to process groups."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thinwire.integrate.mesh import init_mesh
from thinwire.policy import Policy

from .layout import Layout


def build_mesh(layout: Layout, policy: Policy | str | None = None) -> DeviceMesh:
    """A mesh over all ranks, one axis after the other as in ``Layout.mesh_sizes``.

    policy: what the groups' messages go through; None: torch's own groups.
    """
    sizes = layout.mesh_sizes()
    if policy is not None:
        return init_mesh(sizes, policy)
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup | None:
    """The group of this rank along ``axis``; None if the axis is absent or has one rank."""
    names = mesh.mesh_dim_names or ()
    if axis not in names or mesh[axis].size() == 1:
        return None
    return mesh.get_group(axis)


def axis_mesh(mesh: DeviceMesh, axis: str) -> DeviceMesh | None:
    """The 1-D mesh of this rank along ``axis``; None if the axis is absent or has one rank."""
    return None if axis_group(mesh, axis) is None else mesh[axis]


def axis_rank(mesh: DeviceMesh, axis: str) -> int:
    """This rank's position along ``axis``; 0 if the axis is absent."""
    return mesh.get_local_rank(axis) if axis in (mesh.mesh_dim_names or ()) else 0
