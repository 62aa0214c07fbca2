"""Cut state: for all degrees that nest, a step is the step of replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support import TIMEOUT_S, same
from thinwire.launch import run_ranks

from .sharded_models import Exact, Net, backward, chains, cut, plain_step, sgd

pytestmark = pytest.mark.usefixtures("kernels")


def _exact(rank: int, world: int, hosts: tuple[int, ...], report: Any) -> None:
    expected = Exact()
    losses = [plain_step(expected, world, step, 0.25) for step in range(2)]
    for degrees in chains(world):
        for per_host in hosts:
            net = Exact()
            model = cut(net, degrees, ranks_per_host=per_host)
            for step in range(2):
                loss = backward(model, net, rank, step)
                assert rank or loss == losses[step], f"{degrees} step {step}"
                sgd(model, 0.25)
            found = model.parameters()
            for name, p in expected.named_parameters():
                assert same(found[name], p.detach()), f"{degrees}, {per_host} ranks a host: {name}"
            model.check()
            model.close()
            model.ladder.close()


def test_all_degrees_give_the_bits_of_replicas_where_sums_are_exact() -> None:
    run_ranks(_exact, 4, (2,), timeout=TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "hosts"), [(4, (1, 4)), (8, (2,))])
def test_so_do_other_ranks_and_hosts(ranks: int, hosts: tuple[int, ...]) -> None:
    run_ranks(_exact, ranks, hosts, timeout=400)


def _close_to_replicas(rank: int, world: int, report: Any) -> None:
    expected = Net()
    losses = [plain_step(expected, world, step, 0.1) for step in range(3)]
    for degrees in list(chains(world))[1::3]:
        net = Net()
        model = cut(net, degrees, ranks_per_host=2)
        for step in range(3):
            loss = backward(model, net, rank, step)
            assert rank or abs(loss - losses[step]) < 1e-5, f"{degrees} step {step}"
            sgd(model, 0.1)
        for name, p in expected.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(model.parameters()[name], p.detach(), rtol=1e-5, atol=1e-6)
        model.close()
        assert same(net.frozen, expected.frozen)
        for name, p in expected.named_parameters():
            torch.testing.assert_close(
                dict(net.named_parameters())[name].detach(), p.detach(), rtol=1e-5, atol=1e-6
            )
        model.ladder.close()


def test_degrees_are_close_to_replicas() -> None:
    run_ranks(_close_to_replicas, 4, timeout=TIMEOUT_S)


@pytest.mark.slow
def test_degrees_that_are_no_powers_of_two_are_close_to_replicas() -> None:
    """Not exact: a sixth of a sum of integers is rounded, and with it the parameters of the second step."""
    run_ranks(_close_to_replicas, 6, timeout=TIMEOUT_S)
