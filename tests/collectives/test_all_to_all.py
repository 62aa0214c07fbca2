from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from collectives.oracle import decoded
from support import gaussian, meter, run_threads, same
from thinwire import CallOptions, parse, wire
from thinwire.collectives import all_to_all
from thinwire.collectives.options import derive_seed

pytestmark = pytest.mark.usefixtures("kernels")


def numel_of(sender: int, receiver: int) -> int:
    """Uneven, some of them nothing."""
    return (sender * 37 + receiver * 101) % 5 * 150


def message(sender: int, receiver: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return gaussian(10 * sender + receiver, numel_of(sender, receiver), dtype)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_uneven_messages_arrive_decoded_and_the_own_exactly(world: int) -> None:
    cases = [
        (spec, dtype, CallOptions(seed=4, padded=padded))
        for spec in ("none", "bf16", "int8:block=32", "zfp:rate=8", "mpc:dim=1")
        for dtype in (torch.float32, torch.float16)
        for padded in ((False,) if parse(spec).fixed_size else (False, True))
    ]

    def run(group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
        me = group.rank()
        results = []
        for spec, dtype, options in cases:
            ins = [message(me, peer, dtype) for peer in range(world)]
            outs = [torch.full((numel_of(peer, me),), torch.nan, dtype=dtype) for peer in range(world)]
            transport = meter(group)
            all_to_all(ins, outs, parse(spec), transport, options)
            if parse(spec).fixed_size:
                peers = [x for peer, x in enumerate(ins) if peer != me and x.numel()]
                expected = sum(wire.max_frame_nbytes(parse(spec), x.numel(), dtype) for x in peers)
                assert transport.tally.wire_bytes == expected
            results.append(outs)
        return results

    results = run_threads(run, world)
    for i, (spec, dtype, options) in enumerate(cases):
        for me in range(world):
            for peer in range(world):
                x = message(peer, me, dtype)
                if peer != me:
                    x = decoded(parse(spec), x, derive_seed(options.seed, peer, me, 0))
                assert same(results[me][i][peer], x), f"{spec} {dtype} {peer} -> {me}"
