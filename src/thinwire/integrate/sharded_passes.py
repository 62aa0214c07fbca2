"""The passes over a model whose state is cut: units are gathered, used, freed and reduced, while other units compute.

Hooks of modules say when a unit's parameters are needed, hooks of outputs and parameters when its gradients come. Gathers
and sums have a thread and groups each: the order of either is the same on all ranks, that of one among the other is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..collectives.work import Worker
from ..errors import UnsupportedError
from .ladder import Ladder
from .sharded_units import Member, Unit, wait

# Parts of seeds; those of steps begin at 10.
_PASS, _REDUCE = 1, 2


class Passes:
    """Forward and backward passes over units, whose parameters this frees at once.

    counters: see :class:`.sharded.ShardedModel`. gathers, sums: the threads, in whose order calls of others run, too.
    """

    def __init__(
        self, units: Sequence[Unit], ladder: Ladder, counters: Tensor, gradient_dtype: torch.dtype
    ) -> None:
        self._units = units
        self._ladder, self._degrees = ladder, ladder.degrees
        self._counters = counters
        self._gradient_dtype = gradient_dtype
        self._scale = 1.0
        self._passes = 0  # backward passes of this step
        self._next = 0  # of the units from the last to the first: which one is reduced next
        self._running = False  # a backward pass
        self.gathers, self.sums = Worker("thinwire/gathers"), Worker("thinwire/sums")
        finalize(self, _close, self.gathers, self.sums)
        self._handles: list[RemovableHandle] = []
        for unit in units:
            self._free(unit)
            self._hook(unit)

    def start(self, scale: float) -> None:
        """Begin a step. scale: what losses are multiplied by."""
        self._scale, self._passes, self._next, self._running = scale, 0, 0, False
        for unit in self._units:
            wait(unit.works)
            unit.grads = unit.total = unit.message = None
            unit.arrived, unit.in_backward = 0, False

    def drop(self) -> None:
        """Let go of gathered parameters: they are gathered anew for the next pass."""
        for unit in self._units:
            unit.settle()
            unit.copy = None
            self._free(unit)

    def close(self) -> None:
        """Gather all parameters, and let go of the modules. Every rank calls it."""
        self.drop()
        for unit in self._units:
            self._fetch(unit, backward=False)
            self._need(unit)
            unit.copy = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _close(self.gathers, self.sums)

    def _hook(self, unit: Unit) -> None:
        before: Any = lambda module, args: self._before_forward(unit)  # noqa: E731
        after: Any = lambda module, args, out: self._after_forward(unit, out)  # noqa: E731
        self._handles.append(unit.module.register_forward_pre_hook(before))
        self._handles.append(unit.module.register_forward_hook(after))
        for member in unit.members:
            register: Any = member.parameter.register_post_accumulate_grad_hook
            self._handles.append(register(_on_gradient(self, unit, member)))

    def _before_forward(self, unit: Unit) -> None:
        self._fetch(unit, backward=False)
        if unit.index + 1 < len(self._units) and not self._running:
            self._fetch(self._units[unit.index + 1], backward=False)
        self._need(unit)

    def _after_forward(self, unit: Unit, outputs: Any) -> None:
        if not unit.in_backward:  # a pass that is run again inside of the backward pass keeps them
            self._free(unit)
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                register: Any = output.register_hook
                register(lambda _: self._before_backward(unit))

    def _before_backward(self, unit: Unit) -> None:
        self._begin_backward()
        if unit.in_backward:
            return
        unit.in_backward = True
        self._fetch(unit, backward=True)
        if unit.index > 0:
            self._fetch(self._units[unit.index - 1], backward=True)
        self._need(unit)

    def _begin_backward(self) -> None:
        if not self._running:
            self._running, self._next = True, 0
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._after_backward)

    @torch.no_grad()
    def _arrived(self, unit: Unit, member: Member) -> None:
        assert member.parameter.grad is not None
        self._begin_backward()
        if unit.index > len(self._units) - 1 - self._next:
            raise UnsupportedError(
                f"parameter {member.name} got a gradient twice in one backward pass: what is computed again inside of it "
                "(reentrant checkpoints) does not go with cut state; use torch.utils.checkpoint with use_reentrant=False"
            )
        if unit.message is None:
            unit.message = torch.zeros(unit.numel, dtype=self._gradient_dtype)
        unit.message[member.begin : member.end].copy_(member.parameter.grad.reshape(-1))
        member.parameter.grad = None
        unit.arrived += 1
        # A unit never overtakes one behind it: all ranks reduce in the same order.
        order = self._units[::-1]
        while self._next < len(order) and order[self._next].arrived == len(order[self._next].members):
            self._launch(order[self._next])
            self._next += 1

    def _after_backward(self) -> None:
        """Reduce what did not get all of its gradients, zeros where there was none."""
        for unit in self._units[::-1][self._next :]:
            self._launch(unit)
        self._next, self._running = 0, False
        self._passes += 1

    def _launch(self, unit: Unit) -> None:
        message = (
            unit.message if unit.message is not None else torch.zeros(unit.numel, dtype=self._gradient_dtype)
        )
        unit.message, unit.arrived, unit.in_backward, unit.copy = None, 0, False, None
        unit.settle()  # its turn did not come
        self._free(unit)
        seed = (_REDUCE, int(self._counters[0]), unit.index, self._passes)

        def call() -> None:
            if self._scale != 1.0:
                message.div_(self._scale)  # residuals are unscaled
            part = self._ladder.reduce(message, 1, self._degrees.grads, unit.residuals, seed=seed)
            unit.grads = part if unit.grads is None else unit.grads.add_(part)

        unit.works.append(self.sums.submit(call, None))

    def _fetch(self, unit: Unit, *, backward: bool) -> None:
        """Start to gather a unit's parameters, unless they are here or on their way."""
        if unit.whole or unit.fetch is not None:
            return
        unit.allocate()
        keep = self._degrees.secondary if torch.is_grad_enabled() and not backward else None
        part, high, into = unit.shard, self._degrees.params, unit.memory()
        if backward and unit.copy is not None:
            assert self._degrees.secondary is not None
            part, high, unit.copy = unit.copy, self._degrees.secondary, None
        # Of the last gather after a step: both passes, evaluations and a run that is resumed see the same rounding.
        seed = (_PASS, int(self._counters[1]), unit.index)

        def call() -> None:
            found, degree = part, high
            if keep is not None:
                found, degree = self._ladder.gather(part, high, keep, seed=seed), keep
                unit.copy = found
            self._ladder.gather(found, degree, 1, seed=seed, into=into)

        unit.fetch = self.gathers.submit(call, None)

    def _need(self, unit: Unit) -> None:
        """Wait for a unit's parameters, and show them."""
        if unit.settle():
            unit.show()

    def _free(self, unit: Unit) -> None:
        if self._degrees.params > 1:
            unit.free()


def _close(*workers: Worker) -> None:
    for worker in workers:
        worker.close()


def _on_gradient(passes: Passes, unit: Unit, member: Member) -> Callable[[Tensor], None]:
    """Tell ``passes`` of a gradient. Only weakly: what a parameter's hook holds is never collected."""
    passes_ref, unit_ref, member_ref = ref(passes), ref(unit), ref(member)

    def hook(_: Tensor) -> None:
        to, owner, part = passes_ref(), unit_ref(), member_ref()
        if to is not None and owner is not None and part is not None:
            to._arrived(owner, part)

    return hook
