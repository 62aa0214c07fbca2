"""Under FSDP2 the backward pass goes on while gradients are reduced, with the bits of one that waits.

Where FSDP reads what was reduced (a second backward pass), it waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from support import TIMEOUT_S, gaussian, same
from thinwire import ThinwireGroup, compress_fsdp, init_mesh
from thinwire.collectives.transport import Metered
from thinwire.group import register
from thinwire.integrate.fsdp_deferred import Deferred
from thinwire.launch import run_ranks
from thinwire.policy import from_dict

pytestmark = pytest.mark.usefixtures("kernels")
WIDTH = 32
POLICY = from_dict(
    {
        "axis": {
            "dp": {"reduce": "int4:block=32", "feedback": True, "min_nbytes": 0},
            "zero": {"gather": "int8:block=32", "min_nbytes": 0},
        }
    },
    "test",
)


class Held(ThinwireGroup):
    """A group whose reductions wait for ``gate``; ``waited``: whether they have seen it open."""

    gate = threading.Event()
    waited: list[bool] = []  # noqa: RUF012

    def submit(self, message: Any, call: Callable[[Metered], None], *rest: Any, **options: Any) -> dist.Work:
        if message.op != "reduce_scatter":
            return super().submit(message, call, *rest, **options)

        def held(transport: Metered) -> None:
            self.waited.append(self.gate.wait(TIMEOUT_S / 4))
            call(transport)

        return super().submit(message, held, *rest, **options)


class Net(nn.Module):
    """between: called in a backward pass when the second layer's gradients are on their way, before the first layer's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.between: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if x.requires_grad:
            x.register_hook(lambda _: self.between())
        return self.layers[1](x.tanh()).square().mean()  # type: ignore[no-any-return]


def _gradients(mesh: Any, rank: int, *, hold: bool) -> list[Tensor]:
    """Gradients of three steps, of which the second has two backward passes that add up."""
    model: Any = Net()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    compress_fsdp(model)
    gate, found = Held.gate, []
    for step, passes in enumerate((1, 2, 1)):
        model.zero_grad()
        for turn in range(passes):
            # What is added to an earlier gradient is read at once.
            if hold and turn == 0:
                gate.clear()
                model.between = gate.set
            model(gaussian(10 * step + 100 * turn + rank, 4 * WIDTH).view(4, WIDTH)).backward()
        found += [p.grad.to_local().clone() for p in model.parameters()]
    return found


def _deferred(rank: int, world: int, report: Any) -> None:
    register("held-test", Held)
    mesh = init_mesh({"dp": world}, POLICY, backend="held-test")
    found = _gradients(mesh, rank, hold=True)
    assert all(Held.waited), "the backward pass went on while its first reduction waited"
    Held.gate.set()
    Deferred.possible = staticmethod(lambda: False)  # type: ignore[method-assign]
    expected = _gradients(mesh, rank, hold=False)
    assert len(found) == len(expected) == 12
    assert all(map(same, found, expected))


def test_reductions_travel_while_the_backward_pass_goes_on() -> None:
    run_ranks(_deferred, 2, timeout=TIMEOUT_S)
