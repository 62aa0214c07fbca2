"""All-gather in log2(ranks) rounds: after k of them a rank has what it and the 2**k - 1 ranks after it had (Bruck 1997).

For small messages, whose time is that of the rounds and not of the bytes. Recursive doubling of sums would encode a sum
again in every round, and its error would grow with the number of rounds; here encoded frames are gathered, and every
rank adds all of them up, in fp32, in rank order: one encoding, the same bits everywhere, and with a lossless codec the
values of ``two_shot``.
"""

from __future__ import annotations

from torch import Tensor

from .pairwise import Pairwise
from .rounds import AtOnce
from .transport import Metered, Pending


class Doubling(Metered):
    """A metered transport whose all-gathers run in rounds of doubling size."""

    def __init__(self, transport: Metered) -> None:
        super().__init__(
            transport.inner, transport.tally, transport.ends, transport.watch, checksum=transport.checksum
        )

    def all_gather(self, out: Tensor, inp: Tensor) -> Pending:
        me, size, nbytes = self.rank, self.size, inp.numel()
        pairwise = Pairwise(self, inp.device)
        found = out.new_empty(out.numel())  # from this rank's on, around
        found[:nbytes] = inp
        have = 1
        while have < size:
            count = min(have, size - have)
            leaving = [((me - have) % size, found[: count * nbytes])]
            arriving = [((me + have) % size, found[have * nbytes : (have + count) * nbytes])]
            pairwise.start(leaving, arriving).wait()
            have += count
        first = (size - me) * nbytes
        out[me * nbytes :] = found[:first]
        out[: me * nbytes] = found[first:]
        return AtOnce()
