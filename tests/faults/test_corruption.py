"""Bytes that change on the wire, over real gloo: found in the header always, in the payload where frames carry a checksum.

The rank that finds them names the sender and the call, all others are told. Every flipped bit of a header is in
tests/test_wire.py, payloads of all kinds in the fuzz tests of the codecs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from faults.flips import Flipping
from faults.victim import Seen, filled, new_group, policy, seen
from support import TIMEOUT_S, gaussian, run_threads
from thinwire import GroupOptions, ThinwireGroup, parse
from thinwire.codecs import list_codecs
from thinwire.collectives import Chunks, all_gather, reduce_scatter
from thinwire.collectives.options import CallOptions
from thinwire.collectives.torch_transport import TorchTransport
from thinwire.collectives.traffic import Tally
from thinwire.collectives.transport import Metered
from thinwire.errors import SpecError, WireError
from thinwire.launch import run_ranks
from thinwire.wire import HEADER_NBYTES

pytestmark = pytest.mark.usefixtures("kernels")

N = 3000
FINDER = 2
TIME_OUT_S = 60.0  # much longer than all of it takes


def _reduce_scatter(group: ThinwireGroup, rank: int) -> Any:
    return dist.reduce_scatter_single(torch.empty(N // 3), filled(N, rank), group=group)


def _all_gather(group: ThinwireGroup, rank: int) -> Any:
    return dist.all_gather_single(torch.empty(N), filled(N // 3, rank), group=group)


def _all_to_all(group: ThinwireGroup, rank: int) -> Any:
    return dist.all_to_all_single(torch.empty(N), filled(N, rank), group=group)


def _point_to_point(group: ThinwireGroup, rank: int) -> None:
    if rank == 0:
        dist.send(filled(N, rank), 2, group)
    elif rank == 2:
        dist.recv(torch.empty(N), 0, group)


OPS: dict[str, Callable[[ThinwireGroup, int], Any]] = {
    "all_reduce": lambda group, rank: dist.all_reduce(filled(N, rank), group=group),
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": lambda group, rank: dist.broadcast(filled(N, rank), 0, group=group),
    "recv": _point_to_point,
}


SIZE = -1
SIZES_NBYTES = 8 * 3
WRONG = {
    9: "frame has header checksum",
    HEADER_NBYTES + 5: "frame has payload checksum",
    SIZE: "the size of a frame has a wrong checksum",
}
"""Byte of a frame -> what the rank that receives it says of it."""
ANNOUNCED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


class Flip:
    """Flips the lowest bit of a byte of each frame: ``where`` counts from the frame's begin; SIZE: of what announces it."""

    def __init__(self, where: int) -> None:
        self._where = where
        self._body_follows = False

    def __call__(self, received: Tensor) -> None:
        # A header begins with "tw". Other buffers are sizes, what the ranks compare, or a body whose header came before.
        starts = ((received[:-1] == 0x74) & (received[1:] == 0x77)).nonzero()[:, 0].tolist()
        if self._where == SIZE:
            if received.numel() == SIZES_NBYTES:
                received[0] ^= 1
            return
        if self._body_follows:
            starts = [-HEADER_NBYTES]
        self._body_follows = not self._body_follows and received.numel() == HEADER_NBYTES and bool(starts)
        for start in starts:
            if 0 <= start + self._where < received.numel():
                received[start + self._where] ^= 1


def _call_and_go_on(call: Callable[[ThinwireGroup, int], Any], group: ThinwireGroup, rank: int) -> None:
    """A rank that had all it needed of a call finds out in the next one."""
    call(group, rank)
    dist.all_reduce(filled(N, rank), group=group)


def _corrupted(rank: int, world: int, report: Any) -> dict[tuple[str, str, int], Seen]:
    found = {}
    for codec in ("int8:block=32", "mpc:dim=1"):  # of fixed and of variable size
        for where in WRONG:
            for op, call in OPS.items():
                if where == SIZE and (op not in ANNOUNCED or not codec.startswith("mpc")):
                    continue
                group = new_group(policy(codec), TIME_OUT_S, checksum=True)
                if rank == FINDER:
                    assert group._lanes is not None
                    first = group._lanes.endpoints[0]
                    first.transport = Flipping(first.transport, Flip(where))
                found[op, codec, where] = seen(partial(_call_and_go_on, call, group, rank))
                dist.destroy_process_group(group)
    return found


def test_changed_bytes_are_found_and_all_ranks_are_told() -> None:
    begin = time.monotonic()
    ranks = run_ranks(_corrupted, 3, timeout=TIMEOUT_S)
    assert time.monotonic() - begin < TIME_OUT_S
    for key, what in ranks[FINDER].items():
        op, codec, where = key
        if key[1:] == ("int8:block=32", 9):
            for rank in range(3):
                print(f"rank {rank} {key}: {ranks[rank][key]}\n")
        wrong = WRONG[where]
        assert what.kind == "WireError", (key, what)
        assert what.text.startswith(f"rank {FINDER}: {op}, unknown, {codec.split(':')[0]}"), (key, what)
        assert "from rank 0: " + wrong in what.text, (key, what)
        for rank in (0, 1):
            told = ranks[rank][key]
            assert told.kind == "PeerError", (key, rank, told)
            assert "All 3 ranks report a failure, none is lost" in told.text, (key, rank, told)
            assert f"rank(s) {FINDER}: {op}, unknown, {codec.split(':')[0]}" in told.text, (key, rank, told)
            assert "WireError: from rank 0: " + wrong in told.text, (key, rank, told)


def _without_checksum(group: dist.ProcessGroup) -> int:
    """Payload bytes of every codec, changed at random on both ranks: values or a WireError, nothing else."""
    generator = torch.Generator().manual_seed(7 + group.rank())

    def flip(received: Tensor) -> None:
        if received.numel() <= 64:
            return  # sizes
        for place in torch.randint(HEADER_NBYTES, received.numel(), (20,), generator=generator).tolist():
            received[place] ^= int(torch.randint(1, 256, (), generator=generator))

    transport = Metered(Flipping(TorchTransport(group), flip), Tally())
    refused = 0
    for name in list_codecs():
        try:
            codec = parse(name)
        except SpecError:
            continue  # needs parameters
        for turn in range(6):
            x = gaussian(turn, 999)
            outs = [torch.empty(999) for _ in range(2)]
            for call in (
                lambda: all_gather(x, outs, codec, transport, CallOptions()),  # noqa: B023
                lambda: reduce_scatter(x, codec, transport, Chunks.of(999, 2, codec.granule), CallOptions()),  # noqa: B023
            ):
                with suppress(WireError):
                    call()
                    continue
                refused += 1
    return refused


def test_without_a_checksum_changed_payloads_give_other_values_or_a_wire_error() -> None:
    refused = run_threads(_without_checksum, 2)
    assert all(refused), "codecs of variable size find most of it"


def test_the_checksum_is_an_option_of_the_group() -> None:
    assert not GroupOptions().checksum
