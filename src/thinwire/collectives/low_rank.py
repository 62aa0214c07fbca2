"""Low-rank all-reduce of gradients: PowerSGD (Vogels, Karimireddy, Jaggi 2019, arXiv 1905.13727, Algorithms 1 and 2).

Compensate -> project -> all-reduce P -> orthonormalize -> project back -> all-reduce Q -> expand. With M the matrix of
the gradient plus the residual, on each rank its own: P = mean(M) Q, P^ = orthonormal columns of P, Q' = mean(M)^T P^,
and the mean gradient is P^ Q'^T, the projection of mean(M) onto the span of P^. Both rounds are exact all-reduces of
fp32 values (``none``), P and Q of all matrices in one message each; what is in no matrix travels with P. All of it is
linear in the ranks' M, so the error does not depend on how many ranks there are. Q' starts the next step.

The residual is M - P^ (M^T P^)^T, of the rank's own M, as in line 9 of Algorithm 2. The authors' program and PyTorch's hook
subtract the mean, P^ Q'^T: the sum over ranks is the same, and only that sum has an effect, but then what a rank's
gradient differs by from the mean is never taken out of its residual, which grows with the number of steps.

P^, Q' and the result have the same bits on every rank, whatever CPU it has: all ranks compute them from the same bits, with
kernels whose sums have a fixed order (:mod:`thinwire.codecs.lowrank`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..codecs.lowrank import expand, orthonormalize, project, project_back, renew, subtract
from .all_reduce import all_reduce
from .monitor import EXACT
from .options import CallOptions
from .transport import Metered


@dataclass
class Matrix:
    """rows x columns values of a flat message from ``begin`` on, row by row, and what its next reduction starts from.

    q: fp32, rank x columns, rows of length 1, the same bits on all ranks; every call changes it in place, unless the
    gradient is 0 or not finite.
    """

    begin: int
    rows: int
    columns: int
    q: Tensor

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.columns

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.begin : self.end].view(self.rows, self.columns)


def low_rank_all_reduce(
    flat: Tensor,
    matrices: Sequence[Matrix],
    transport: Metered,
    options: CallOptions,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    begin: int = 0,
) -> None:
    """Fill ``out`` with values ``begin`` .. ``begin + out.numel()`` of the sum of flat over all ranks, or the mean.

    flat: fp32, contiguous, on the CPU. matrices: in the order of the message, not overlapping; the same on all ranks. Their
    values are approximated, all others exact. residual: fp32, numel of flat; added to flat first, and replaced by what
    the approximation lost of it. out: fp32; None: flat itself. A matrix with NaN or Inf on any rank is NaN on all ranks.
    """
    if flat.numel() == 0:
        return
    out = flat if out is None else out
    options = replace(options, levels=())  # both rounds are exact on all levels
    # compensate
    values, watch = flat if residual is None else residual.add_(flat), transport.watch
    if watch.exact:
        total = values.clone()
        all_reduce(total, EXACT, transport, options)
        out.copy_(total[begin : begin + out.numel()])
        if residual is not None:
            residual.zero_()
        return
    lost = residual
    if watch.sampled:
        watch.before(values)
        lost = values.clone() if residual is None else residual
    gaps = list(_gaps(matrices, flat.numel()))
    # P = M Q
    first = flat.new_empty(
        sum(m.rows * m.q.shape[0] for m in matrices) + sum(stop - start for start, stop in gaps)
    )
    ps, rest = _thin(first, [(m.rows, m.q.shape[0]) for m in matrices])
    with transport.tally.encoding():
        for matrix, p in zip(matrices, ps, strict=True):
            project(matrix.view(values), matrix.q, p)
        _gather_gaps(values, gaps, rest)
    all_reduce(first, EXACT, transport, options)
    # Q = M^T P; the residual needs the rank's own, so it comes before the sum
    second = flat.new_empty(sum(m.q.numel() for m in matrices))
    qs, _ = _thin(second, [(m.q.shape[0], m.columns) for m in matrices])
    with transport.tally.encoding():
        for matrix, p, q in zip(matrices, ps, qs, strict=True):
            orthonormalize(p)
            project_back(matrix.view(values), p, q)
            if lost is not None:
                subtract(matrix.view(lost), p, q)
    all_reduce(second, EXACT, transport, options)
    # P Q^T
    with transport.tally.decoding():
        for matrix, p, q in zip(matrices, ps, qs, strict=True):
            start, stop = _overlap(matrix.begin, matrix.end, begin, out.numel())
            expand(p, q, start - matrix.begin, out[start - begin : stop - begin])
            renew(q, matrix.q)
        for (gap, end), part in zip(gaps, torch.split(rest, [b - a for a, b in gaps]), strict=True):
            start, stop = _overlap(gap, end, begin, out.numel())
            out[start - begin : stop - begin] = part[start - gap : stop - gap]
            if lost is not None:
                lost[gap:end] = 0
    if watch.sampled and lost is not None:
        watch.after(lost)


def _gaps(matrices: Sequence[Matrix], numel: int) -> Iterator[tuple[int, int]]:
    """First value and end of what lies between the matrices."""
    at = 0
    for begin, end in [*((m.begin, m.end) for m in matrices), (numel, numel)]:
        if at < begin:
            yield at, begin
        at = end


def _gather_gaps(values: Tensor, gaps: Sequence[tuple[int, int]], out: Tensor) -> None:
    if gaps:
        torch.cat([values[start:stop] for start, stop in gaps], out=out)


def _thin(message: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[list[Tensor], Tensor]:
    """Views of these shapes, one after the other, and what is left of the message."""
    sizes = [rows * columns for rows, columns in shapes]
    *parts, rest = torch.split(message, [*sizes, message.numel() - sum(sizes)])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)], rest


def _overlap(start: int, stop: int, begin: int, numel: int) -> tuple[int, int]:
    """The part of [start, stop) that lies in the ``numel`` values from ``begin`` on; of length 0 if none does."""
    return min(max(begin, start), stop), min(max(begin + numel, start), stop)
