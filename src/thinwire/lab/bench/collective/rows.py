"""From what the ranks have measured to rows of the result, and to broken promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ....collectives.traffic import raw_nbytes
from .cases import OPS
from .measure import Measured


@dataclass(frozen=True)
class Row:
    """One contender with one message. Bandwidths in MB/s (10**6 bytes), of the uncompressed message."""

    op: str
    nbytes: int
    """Of the message, see :mod:`.cases`."""
    contender: str
    sent_as: str
    """The codec in use; ``pass-through``: none."""
    us: float
    """Time of a call: each rank's median over the repeats, the slowest rank's of these."""
    mean_us: float
    """The mean over the ranks of their medians, for comparison with nccl-tests, which report a mean."""
    alg_mb_s: float
    """Size / time."""
    bus_mb_s: float
    """Algorithm bandwidth times the factor of nccl-tests."""
    effective_mb_s: float
    """Raw bytes per rank / time: the rate at which an uncompressed op with the least traffic would take as long."""
    wire_bytes: float
    """Sent per rank in a call, mean over the ranks, counted at the transport."""
    ratio: float | None
    """Raw / wire bytes; None where nothing is sent."""
    rel_l2: float
    """L2 norm of result - exact over that of exact, over all ranks' results."""
    link_us: float | None
    """Wire bytes / link rate; None without a link of its own for each rank."""

    @property
    def x_link(self) -> float | None:
        """Time over what the link needs for the wire bytes."""
        return self.us / self.link_us if self.link_us else None


def row_of(ranks: Sequence[Measured], link_bit_s: int | None) -> Row:
    """The row of what each rank has measured of the same contender and message. link_bit_s: of each rank's own link."""
    first, world = ranks[0], len(ranks)
    op = OPS[first.op]
    raw = raw_nbytes("send" if op.name == "send_recv" else op.name, first.nbytes, world)
    wire = fmean(m.wire_bytes for m in ranks)
    seconds = max(m.median_s for m in ranks)
    exact_sq = sum(m.exact_sq for m in ranks) or 1.0
    return Row(
        op=op.name,
        nbytes=first.nbytes,
        contender=first.contender,
        sent_as=first.sent_as,
        us=1e6 * seconds,
        mean_us=1e6 * fmean(m.median_s for m in ranks),
        alg_mb_s=first.nbytes / seconds / 1e6,
        bus_mb_s=op.bus_factor(world) * first.nbytes / seconds / 1e6,
        effective_mb_s=raw / seconds / 1e6,
        wire_bytes=wire,
        ratio=raw / wire if wire else None,
        rel_l2=math.sqrt(sum(m.error_sq for m in ranks) / exact_sq),
        link_us=8e6 * op.link_nbytes(wire, world) / link_bit_s if link_bit_s else None,
    )


def broken_promises(ranks: Sequence[Measured]) -> list[str]:
    """What the digests of the ranks' results say against: same bits on all ranks, same bits from the same input."""
    first = ranks[0]
    what = f"{first.op} of {first.nbytes} bytes with {first.contender}"
    found = []
    changed = [rank for rank, m in enumerate(ranks) if len(set(m.digests)) > 1]
    if changed:
        found.append(f"{what}: a repeat with the same input gave other bits on rank(s) {changed}")
    differ = [rank for rank, m in enumerate(ranks) if m.digests[:1] != first.digests[:1]]
    if differ and OPS[first.op].same_everywhere:
        found.append(f"{what}: rank(s) {differ} ended with other bits than rank 0")
    return found
