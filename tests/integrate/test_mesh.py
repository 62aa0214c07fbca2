from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from support import TIMEOUT_S, gaussian
from thinwire import ThinwireGroup, groups, init_mesh
from thinwire.errors import PolicyError, SpecError
from thinwire.launch import run_ranks

pytestmark = pytest.mark.usefixtures("kernels")


def _mesh(rank: int, world: int, report: Any) -> None:
    mesh = init_mesh({"pp": 2, "dp": 1, "tp": 2}, "zhybrid")
    assert mesh.mesh_dim_names == ("pp", "dp", "tp")
    assert tuple(mesh.shape) == (2, 1, 2)
    found = groups(mesh)
    assert {name: g.axis() for name, g in found.items()} == {"pp": "pp", "dp": "dp", "tp": "tp"}
    assert {name: g.size() for name, g in found.items()} == {"pp": 2, "dp": 1, "tp": 2}
    assert [g.rank() for g in found.values()] == list(mesh.get_coordinate() or ())
    assert found["dp"].axis("all_gather") == "zero"
    assert found["dp"].axis("reduce_scatter") == "dp"

    x = gaussian(rank, 5000)
    dist.all_reduce(x, group=found["tp"])
    (message,) = (m for m in found["tp"].traffic.entries() if m.role != "control")
    assert (message.axis, message.role, message.codec) == ("tp", "unknown", "zfp:rate=16")

    # An axis that is the whole world is a thinwire group, too.
    whole = init_mesh({"dp": 4}, "bf16")
    y = torch.full((5000,), float(rank))
    dist.all_reduce(y, group=groups(whole)["dp"])
    assert (y == 6).all()
    (message,) = (m for m in groups(whole)["dp"].traffic.entries() if m.role != "control")
    assert (message.axis, message.role, message.codec) == ("dp", "gradient", "bf16")

    assert groups(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))) == {}
    with pytest.raises(SpecError, match=r"unknown axis 'dpp'; did you mean .*'dp'"):
        init_mesh({"dpp": 4}, "none")
    with pytest.raises(SpecError, match="did you mean 'balanced'"):
        init_mesh({"dp": 4}, "balansed")
    assert groups(init_mesh({"dp": 4}, "balanced"))["dp"].policy.name == "balanced"
    with pytest.raises(PolicyError, match="GradientSync"):
        init_mesh({"dp": 4}, "balanced", feedback=False)
    for group in [*found.values(), *groups(whole).values()]:
        assert isinstance(group, ThinwireGroup)
        dist.destroy_process_group(group)


def test_a_mesh_has_a_group_for_each_axis_that_knows_it() -> None:
    run_ranks(_mesh, 4, timeout=TIMEOUT_S)
