"""A device mesh whose groups compress: one thinwire group for each dimension, told its axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import SpecError, nearest
from ..group import BACKEND, GroupOptions, ThinwireGroup
from ..policy import AXES, Policy
from ..presets import load

# Over a data-parallel group: gradients are reduced (axis dp), sharded parameters are gathered (axis zero).
DP_AXES = {"all_reduce": "dp", "reduce_scatter": "dp", "all_gather": "zero"}
DP_ROLES = {"all_reduce": "gradient", "reduce_scatter": "gradient", "all_gather": "parameter"}


def init_mesh(
    sizes: Mapping[str, int],
    policy: Policy | str,
    *,
    device_type: str = "cpu",
    seed: int = 0,
    feedback: bool = True,
    options: GroupOptions = GroupOptions(),
    backend: str = BACKEND,
) -> DeviceMesh:
    """A DeviceMesh with a thinwire group per axis, outermost axis first.

    sizes: axis (``dp``, ``tp``, ``pp``, ...) -> number of ranks; with ``zero``, parameters are cut over those ranks and
    replicated over ``dp``, and gradients are of axis dp on both (FSDP2's HSDP). feedback: whether the caller reduces
    gradients through :class:`~thinwire.integrate.gradients.GradientSync`, :func:`~thinwire.integrate.ddp.compress_ddp`
    or :func:`~thinwire.integrate.fsdp.compress_fsdp`, which run error feedback; if not, a policy that asks for it is
    refused. options: inner backend, time-out and what else the groups share; policy, axes, roles, seed and inline (for
    tp, whose callers wait at once) are set here, and one lane for tp, and for pp, which sends and receives. backend: a name
    given to :func:`thinwire.group.register`. Needs an initialised default process group, of any backend.

    DTensor takes meshes of the same ranks and names for one another, whatever their groups are (PyTorch's hash of a
    mesh leaves them out): a process that uses DTensor needs one such mesh only.
    """
    loaded = load(policy)
    for axis in sizes:
        if axis not in AXES:
            raise SpecError(f"unknown axis {axis!r}; {nearest(axis, AXES)}")
    override = {}
    for axis in sizes:
        dp = axis in ("dp", "zero")
        override[axis] = (
            backend,
            replace(
                options,
                policy=loaded,
                axis=axis,
                op_axes=DP_AXES if dp else {},
                op_roles=DP_ROLES if dp else {},
                feedback_by_caller=feedback and dp,
                roles_by_caller=not dp,
                inline=axis == "tp",
                lanes=1 if axis in ("tp", "pp") else options.lanes,
                seed=seed,
            ),
        )
    return init_device_mesh(
        device_type,
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override=override,  # type: ignore[arg-type]
    )


def groups(mesh: DeviceMesh) -> dict[str, ThinwireGroup]:
    """The thinwire groups of a mesh by dimension name."""
    names = mesh.mesh_dim_names or ()
    found = {name: mesh.get_group(name) for name in names}
    return {name: group for name, group in found.items() if isinstance(group, ThinwireGroup)}
