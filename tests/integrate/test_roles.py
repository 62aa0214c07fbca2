"""Who knows a message's role tells the group, and the policy may depend on it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support import TIMEOUT_S
from thinwire import ThinwireGroup, groups, init_mesh
from thinwire.errors import PolicyError, UnsupportedError
from thinwire.integrate.roles import as_role, role_tag
from thinwire.launch import run_ranks
from thinwire.policy import from_dict

BY_ROLE = from_dict({"axis": {"tp": {"role": {"activation_gradient": {"all_reduce": "bf16"}}}}}, "by-role")
FLOATS = 4096


def codecs_by_role(group: ThinwireGroup) -> dict[str, str]:
    """Role -> codec of what the group has sent, control traffic aside."""
    return {m.role: m.codec for m in group.traffic.entries() if m.role != "control"}


def _marked(rank: int, world: int, report: Any) -> None:
    group = groups(init_mesh({"tp": world}, BY_ROLE))["tp"]
    with pytest.raises(PolicyError, match=r"codecs for all_reduce by role \(activation_gradient\).*has none"):
        dist.all_reduce(torch.ones(FLOATS), group=group)
    dist.all_reduce(torch.ones(3), group=group)  # small: the same whatever it is
    dist.all_reduce(torch.ones(FLOATS, dtype=torch.int64), group=group)
    group.traffic.reset()
    with as_role(group, "activation"):
        with as_role(group, "activation_gradient"):
            dist.all_reduce(torch.ones(FLOATS), group=group)
        dist.all_reduce(torch.ones(FLOATS), group=group)
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(group.look_up("send", torch.float32, 8)[2]))
        thread.start()
        thread.join()
        assert elsewhere[0].role == "unknown"  # what one thread says does not hold for another
    assert codecs_by_role(group) == {"activation": "pass-through", "activation_gradient": "bf16"}
    with pytest.raises(PolicyError, match="did you mean 'activation'"), group.role("activations"):
        pass
    assert group.look_up("all_reduce", torch.int64, 8)[2].role == "unknown"


def test_a_policy_by_role_takes_the_role_it_is_told_and_refuses_a_message_without() -> None:
    run_ranks(_marked, 2, timeout=TIMEOUT_S)


def _plain(rank: int, world: int, report: Any) -> None:
    x = torch.ones(5)
    with as_role(dist.group.WORLD, "gradient"), as_role(None, "gradient"):
        dist.all_reduce(x)
    assert (x == world).all()


def test_other_groups_hear_nothing() -> None:
    run_ranks(_plain, 2, timeout=TIMEOUT_S)


def test_tags_are_those_of_roles_that_travel_between_two_ranks() -> None:
    assert role_tag("activation") != role_tag("activation_gradient")
    with pytest.raises(UnsupportedError, match="'gradient' has no tag"):
        role_tag("gradient")
