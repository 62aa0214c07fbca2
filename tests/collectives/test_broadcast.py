from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from collectives.oracle import decoded
from support import inputs, meter, run_threads, same
from thinwire import CallOptions, parse
from thinwire.collectives import broadcast
from thinwire.collectives.options import derive_seed

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_the_root_included_hold_its_decoded_bits(world: int) -> None:
    cases = [
        (spec, numel, dtype, root, CallOptions(seed=2, padded=padded))
        for spec in ("none", "bf16", "int4:block=128", "zfp:rate=8", "mpc:dim=1")
        for numel in (0, 1, 3001)
        for dtype in (torch.float32, torch.bfloat16)
        for root in {0, world - 1}
        for padded in ((False,) if parse(spec).fixed_size else (False, True))
    ]

    def run(group: dist.ProcessGroup) -> list[torch.Tensor]:
        results = []
        for spec, numel, dtype, root, options in cases:
            x = inputs(world, numel, dtype)[group.rank()]
            transport = meter(group)
            broadcast(x, parse(spec), transport, root, options)
            assert transport.tally.two_phase + transport.tally.padded == (0 if parse(spec).fixed_size else 1)
            results.append(x)
        return results

    results = run_threads(run, world)
    for i, (spec, numel, dtype, root, options) in enumerate(cases):
        x = inputs(world, numel, dtype)[root]
        expected = decoded(parse(spec), x, derive_seed(options.seed, root, -1, 0))
        assert all(same(results[rank][i], expected) for rank in range(world)), f"{spec} {numel} {dtype}"
