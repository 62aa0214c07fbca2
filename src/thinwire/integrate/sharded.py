"""A model whose parameters, gradients and optimizer state are cut, each over ranks of its own number.

    scheme = thinwire.sharding("zeropp", world, ranks_per_host=8)        # or Sharding.of({"params": 2, ...}, policy)
    model = thinwire.ShardedModel(net, thinwire.Ladder(scheme, ranks_per_host=8), units=list(net.blocks))
    optimizer = torch.optim.AdamW(model.masters(), lr=1e-3)

    for micro_batches in batches:
        model.start()
        for x in micro_batches:
            loss_of(net(x)).backward()
        model.finish()
        optimizer.step()
        model.commit()      # or model.skip()

A unit's parameters are gathered before its part of the forward pass and again before its part of the backward pass, and
freed after each; its gradients are reduce-scattered when they are complete. Both run while other units compute: gathers and
sums have a thread and groups each. A step is gather -> compute -> reduce for each micro-batch, then reduce to the part that
the optimizer has -> update -> gather to the parts that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from . import sharded_state as state
from .ladder import Ladder
from .sharded_passes import Passes
from .sharded_units import Unit, make_units, wait

# Parts of seeds; those below are of passes.
_GATHER, _REDUCE, _ALL_REDUCE = 10, 11, 12


class ShardedModel:
    """What ``ladder.degrees`` say of ``model``, whose modules stay as they are and are called as before.

    Every rank makes it with the same model, values included, and runs as many forward and backward passes with the same
    units in them. units: modules that are gathered and reduced as one each, as a rule the blocks; what is left of the model
    is one more. Frozen parameters stay whole. labels: name -> label; the optimizer may treat each label differently (see
    :meth:`masters`). gradient_dtype: of sums over micro-batches and of what is reduced; bfloat16 halves their memory and
    rounds each sum. rollback: keep copies of residuals, so that :meth:`skip` can undo a step.

    Raises UnsupportedError for what cannot be cut, MismatchError for ranks whose values differ.
    """

    def __init__(
        self,
        model: nn.Module,
        ladder: Ladder,
        units: Sequence[nn.Module] = (),
        *,
        labels: Callable[[str], Hashable] = lambda name: None,
        gradient_dtype: torch.dtype = torch.float32,
        rollback: bool = False,
    ) -> None:
        if gradient_dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedError(
                f"gradient_dtype={gradient_dtype}: must be torch.float32 or torch.bfloat16"
            )
        self.ladder, self.degrees = ladder, ladder.degrees
        self.units = make_units(model, units, ladder, labels, gradient_dtype, rollback)
        self._gradient_dtype = gradient_dtype
        # Steps so far, and the one whose gather made the shards (-1: they are rounded masters).
        self.counters = torch.tensor([0, -1], dtype=torch.int64)
        self.digests = state.make_digests(self)
        self._segments: list[tuple[Hashable, Tensor, Unit, slice]] = [
            (label, unit.master[begin:end], unit, slice(begin, end))
            for unit in self.units
            for label, begin, end in unit.segments(
                ladder.begin(unit.numel, self.degrees.optim), unit.master.numel()
            )
        ]
        state.check_same(self, "values at the start", lambda unit: [unit.memory()], 1)
        self._passes = Passes(self.units, ladder, self.counters, gradient_dtype)

    # What the caller does in a step.

    def masters(self, label: Hashable = None) -> list[Tensor]:
        """The parts of fp32 masters that have this label (None: all), which the optimizer changes. Flat; ``finish`` sets
        their ``grad``. A label without a value on this rank has none."""
        return [tensor for found, tensor in self.labelled_masters() if label is None or found == label]

    def labelled_masters(self) -> list[tuple[Hashable, Tensor]]:
        """Each part of the masters with its label. The same tensor objects each time."""
        return [(label, master) for label, master, _, _ in self._segments]

    def start(self, scale: float = 1.0) -> None:
        """Begin a step. scale: what losses are multiplied by."""
        self._passes.start(scale)
        for unit in self.units:
            for feedback in unit.residuals.values():
                feedback.begin()

    def finish(self) -> None:
        """Wait for what is under way, bring gradients to the optimizer's parts and set ``grad`` of all masters: means."""
        step = int(self.counters[0])
        works = [self._passes.sums.submit(partial(self._total, unit, step), None) for unit in self.units]
        for unit, work in zip(self.units, works, strict=True):
            wait(unit.works)
            work.wait()
        for _, master, unit, where in self._segments:
            assert unit.total is not None
            master.grad = unit.total[where]

    def gradients(self) -> list[Tensor]:
        """After ``finish``: this rank's parts of the mean gradients, flat, fp32; masters' ``grad`` shares their memory."""
        return [unit.total for unit in self.units if unit.total is not None]

    def grad_norm(self) -> float:
        """The norm of all gradients after ``finish``: fp64, the same on every rank; not finite if one of them is not."""
        norms = [float(torch.linalg.vector_norm(g, dtype=torch.float64)) for g in self.gradients()]
        own = sum(norm**2 for norm in norms) if self.ladder.replica == 0 else 0.0
        squares: list[float] = state.from_all(own)
        return float(torch.tensor(squares, dtype=torch.float64).sum().sqrt())

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their norm is at most ``max_norm``; what it was before."""
        norm = self.grad_norm()
        if norm > max_norm:
            for gradient in self.gradients():
                gradient.mul_(max_norm / norm)
        return norm

    @torch.no_grad()
    def commit(self) -> None:
        """The masters were updated: bring the parameters to them. If a peer is lost (PeerError), none has changed."""
        self.drop()
        step = int(self.counters[0])
        news: list[Tensor | None] = [None] * len(self.units)

        def gather(unit: Unit) -> None:
            news[unit.index] = self.new_shard(unit, step)

        works = [self._passes.gathers.submit(partial(gather, unit), None) for unit in self.units]
        for work in works:
            work.wait()
        for unit, new in zip(self.units, news, strict=True):
            if new is not None:
                self._apply(unit, new)
        self.counters[1] = step
        self._end_step()

    def skip(self) -> None:
        """The step is not taken: residuals go back to what they were; nothing else has changed."""
        self.drop()
        for unit in self.units:
            for feedback in unit.residuals.values():
                feedback.rollback()
        self._end_step()

    def drop(self) -> None:
        """Let go of gathered parameters: they are gathered anew for the next pass."""
        self._passes.drop()

    def close(self) -> None:
        """Let go of the model: its parameters are whole again, with the values that passes see. Every rank calls it."""
        self._passes.close()

    def held_bytes(self) -> dict[str, int]:
        """Bytes of the tensors that are held now, by kind. Memory that two of them share is counted with the first.

        The optimizer's own state is not among them.
        """
        seen: set[int] = set()
        kinds: dict[str, Callable[[Unit], list[Tensor | None]]] = {
            "masters": lambda u: [u.master],
            "params": lambda u: [u.shard],
            "whole": lambda u: [u.flat],
            "secondary": lambda u: [u.copy],
            "grads": lambda u: [u.grads, u.total, u.message],
            "residuals": lambda u: [t for f in u.residuals.values() for t in (f.sender, f.owner)],
        }
        held = dict.fromkeys(kinds, 0)
        for kind, tensors in kinds.items():
            for tensor in (t for unit in self.units for t in tensors(unit) if t is not None):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    held[kind] += storage.nbytes()
        return held

    # Checkpoints: see sharded_state.

    def parameters(self) -> dict[str, Tensor]:
        """The masters, whole, fp32, by parameter: new tensors. Every rank calls it. For a checkpoint of any layout."""
        return state.parameters(self)

    def load_parameters(self, values: dict[str, Tensor]) -> None:
        """Take whole parameters by name: masters, and parameters rounded from them. The optimizer's state stays."""
        state.load_parameters(self, values)

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's masters, residuals, counters; of differences what was sent last; digests of the parameters.

        They share memory with the live ones. Parameters are not in it: they are made again, and have the same bits.
        """
        return state.state_dict(self)

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Take back what ``state_dict`` gave, and make the parameters again. Every rank calls it.

        Raises CheckpointError, on every rank, for a tensor that is missing or of another size, and, with the unit's name,
        for parameters that are not those that were saved.
        """
        state.load_state_dict(self, saved)

    def rebuild(self) -> None:
        """Make the parameters again, after the tensors of ``state_dict`` were filled in place; see ``load_state_dict``."""
        state.rebuild(self)

    def check(self) -> None:
        """Raise MismatchError, on every rank, if ranks that hold the same do not have the same bits. Every rank calls it."""
        state.check_same(self, "parameters", lambda unit: [unit.shard], self.degrees.params)
        state.check_same(self, "masters", lambda unit: [unit.master], self.degrees.optim)

    def _total(self, unit: Unit, step: int) -> None:
        """The mean gradient at the optimizer's degree, fp32."""
        degrees, grads, unit.grads = self.degrees, unit.grads, None
        if grads is None:
            grads = torch.zeros(unit.numel // degrees.grads, dtype=self._gradient_dtype)
        part = self.ladder.reduce(
            grads, degrees.grads, degrees.optim, unit.residuals, seed=(_REDUCE, step, unit.index)
        )
        self.ladder.all_reduce(part, degrees.optim, unit.residuals, seed=(_ALL_REDUCE, step, unit.index))
        total = part.float().div_(self.ladder.world)
        # A lossy codec may decode the zeros of the padding to something else, which the norm would count.
        begin = self.ladder.begin(unit.numel, degrees.optim)
        total[max(unit.members[-1].end - begin, 0) :].zero_()
        unit.total = total

    def new_shard(self, unit: Unit, step: int) -> Tensor | None:
        """What the shard becomes, or is changed by where the policy sends differences; None: it is the master."""
        if unit.shard is unit.master:
            return None
        degrees = self.degrees
        if degrees.params == degrees.optim:
            return unit.master.to(unit.dtype)
        seed = (_GATHER, step, unit.index)
        if self.difference:
            sent = unit.master - state.part_of_shard(unit, self).float()
            return self.ladder.gather(sent, degrees.optim, degrees.params, seed=seed)
        return self.ladder.gather(unit.master.to(unit.dtype), degrees.optim, degrees.params, seed=seed)

    def _apply(self, unit: Unit, new: Tensor) -> None:
        if self.difference:
            unit.shard.add_(new)
        else:
            unit.shard.copy_(new)

    @property
    def difference(self) -> bool:
        """Whether the gather after a step sends what has changed."""
        rungs = [
            r for r in self.ladder.rungs if self.degrees.params <= r.low and r.high <= self.degrees.optim
        ]
        return any(rung.gathers.policy.axis("zero").difference for rung in rungs)

    def _end_step(self) -> None:
        self.counters[0] += 1
        for _, master, _, _ in self._segments:
            master.grad = None
        for unit in self.units:
            unit.total = unit.grads = None
