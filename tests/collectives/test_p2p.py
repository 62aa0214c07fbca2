from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from collectives.oracle import decoded
from support import gaussian, meter, run_threads, same
from thinwire import parse, wire
from thinwire.collectives import recv, send
from thinwire.errors import WireError

pytestmark = pytest.mark.usefixtures("kernels")
SPECS = ("none", "bf16", "int8:block=32", "zfp:rate=8", "mpc:dim=1")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CASES = [(spec, numel, dtype) for spec in SPECS for numel in (0, 1, 2500) for dtype in DTYPES]


def test_a_message_arrives_decoded_in_order() -> None:
    def run(group: dist.ProcessGroup) -> list[torch.Tensor]:
        transport, results = meter(group), []
        for i, (spec, numel, dtype) in enumerate(CASES):
            x = gaussian(i, numel, dtype)
            if group.rank() == 0:
                send(x, parse(spec), transport, 1, seed=i)
            else:
                out = torch.full_like(x, torch.nan)
                recv(out, parse(spec), transport, 0)
                results.append(out)
        return results

    _, results = run_threads(run, 2)
    for i, (spec, numel, dtype) in enumerate(CASES):
        assert same(results[i], decoded(parse(spec), gaussian(i, numel, dtype), i)), f"{spec} {numel} {dtype}"


def test_bytes_are_counted_where_they_are_sent() -> None:
    def run(group: dist.ProcessGroup) -> tuple[int, int]:
        transport = meter(group)
        for spec in ("int8:block=32", "none"):
            if group.rank() == 0:
                send(torch.ones(100), parse(spec), transport, 1)
            else:
                recv(torch.empty(100), parse(spec), transport, 0)
        return transport.tally.wire_bytes, transport.tally.two_phase

    sent = sum(wire.max_frame_nbytes(parse(s), 100, torch.float32) for s in ("int8:block=32", "none"))
    assert run_threads(run, 2) == [(sent, 0), (0, 0)]


@pytest.mark.parametrize(
    ("sent", "expected", "message"),
    [
        ("bf16", "fp16", "codec digest"),
        ("mpc:dim=1", "mpc:dim=2", "codec digest"),
    ],
)
def test_another_codec_is_found_at_the_first_message(sent: str, expected: str, message: str) -> None:
    def run(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            send(torch.ones(100), parse(sent), meter(group), 1)
        else:
            with pytest.raises(WireError, match=message):
                recv(torch.empty(100), parse(expected), meter(group), 0)

    run_threads(run, 2)


def test_an_announced_size_that_cannot_be_is_refused_before_it_is_received() -> None:
    codec = parse("mpc:dim=1")

    def run(group: dist.ProcessGroup) -> None:
        transport = meter(group)
        if group.rank() == 0:
            frame = torch.empty(wire.max_frame_nbytes(codec, 4000, torch.float32), dtype=torch.uint8)
            wire.pack(codec, gaussian(0, 4000), frame)
            transport.send(frame[: wire.HEADER_NBYTES], 1).wait()
        else:
            with pytest.raises(WireError, match="rank 0 announces"):
                recv(torch.empty(10), codec, transport, 0)

    run_threads(run, 2)
