"""States of stateful codecs: both ends of a stream keep step, and go on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support import inputs, run_threads, same
from thinwire import CallOptions, Codec, parse
from thinwire import collectives as c
from thinwire.collectives.endpoint import Endpoint
from thinwire.collectives.p2p import recv, send_frame
from thinwire.collectives.streams import Ends, Streams
from thinwire.collectives.torch_transport import TorchTransport
from thinwire.collectives.traffic import Message
from thinwire.collectives.transport import Metered
from thinwire.errors import CheckpointError, WireError

pytestmark = pytest.mark.usefixtures("kernels")
STATEFUL, STATELESS = parse("exponent:reuse=8"), parse("exponent:reuse=0")
CODEBOOK_NBYTES = 128
N, WORLD = 12_000, 3
OPTIONS = CallOptions()


def _all_reduce(x: Tensor, codec: Codec, transport: Metered) -> Tensor:
    x = x.clone()
    c.all_reduce(x, codec, transport, OPTIONS)
    return x


def _reduce_scatter(x: Tensor, codec: Codec, transport: Metered) -> Tensor:
    return c.reduce_scatter(x, codec, transport, c.Chunks.of(N, WORLD, codec.granule), OPTIONS)


def _ring(x: Tensor, codec: Codec, transport: Metered) -> Tensor:
    return c.ring_reduce_scatter(x, codec, transport, c.Chunks.of(N, WORLD, codec.granule), OPTIONS)


def _all_gather(x: Tensor, codec: Codec, transport: Metered) -> Tensor:
    outs = [torch.empty(N) for _ in range(WORLD)]
    c.all_gather(x, outs, codec, transport, OPTIONS)
    return torch.cat(outs)


def _broadcast(x: Tensor, codec: Codec, transport: Metered) -> Tensor:
    x = x.clone()
    c.broadcast(x, codec, transport, 1, OPTIONS)
    return x


def _all_to_all(x: Tensor, codec: Codec, transport: Metered) -> Tensor:
    outs = [torch.empty(N // WORLD) for _ in range(WORLD)]
    c.all_to_all(x.chunk(WORLD), outs, codec, transport, OPTIONS)
    return torch.cat(outs)


def _to_the_next(x: Tensor, codec: Codec, transport: Metered) -> Tensor:
    frame, sending = send_frame(x, codec, transport, (transport.rank + 1) % WORLD, 0)
    out = torch.empty(N)
    recv(out, codec, transport, (transport.rank - 1) % WORLD)
    for pending in sending:
        pending.wait()
    del frame
    return out


OPS: dict[str, Callable[[Tensor, Codec, Metered], Tensor]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter of a ring": _ring,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "send": _to_the_next,
}


def run(end: Endpoint, op: str, codec: Codec, turn: int) -> tuple[Tensor, int]:
    """The result of a call with the inputs of its turn, and the bytes that it sent."""
    results: list[Tensor] = []
    x = inputs(WORLD, N, seed=turn)[end.rank]
    message = Message("dp", op, "gradient", str(codec), "float32", 4 * N)
    end.traffic.reset()
    end.run(message, 0.0, lambda transport: results.append(OPS[op](x, codec, transport)))
    return results[0], end.traffic.entries()[message].tally.wire_bytes


@pytest.mark.parametrize("op", OPS)
def test_later_calls_send_no_codebook_and_the_same_values(op: str) -> None:
    def rank(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
        end = Endpoint(TorchTransport(group))
        first, later = [], []
        for turn in range(3):
            expected, _ = run(end, op, STATELESS, turn)
            found, nbytes = run(end, op, STATEFUL, turn)
            assert same(found, expected)
            (later if turn else first).append(nbytes)
        return first, later

    for first, later in run_threads(rank, WORLD):
        # The hops of a ring carry sums of more and more values: a codebook may not fit the next hop.
        slack = 2 * CODEBOOK_NBYTES if "ring" in op else -CODEBOOK_NBYTES / 2
        assert max(later) < min(first) + slack


def test_a_checkpoint_of_the_states_goes_on_with_the_same_bytes() -> None:
    def rank(group: dist.ProcessGroup) -> None:
        whole, resumed = (Endpoint(TorchTransport(group)) for _ in range(2))
        for op in OPS:
            run(whole, op, STATEFUL, 0)
        resumed.streams.load(whole.streams.dump())
        assert resumed.streams.dump() == whole.streams.dump()
        for op in OPS:
            expected, nbytes = run(whole, op, STATEFUL, 1)
            found, as_many = run(resumed, op, STATEFUL, 1)
            assert same(found, expected)
            assert as_many == nbytes

    run_threads(rank, WORLD)


def test_ends_that_do_not_remember_the_same_are_told() -> None:
    # Rank 1 has forgotten what the others' frames need; they take its frame, which brings a codebook.
    def rank(group: dist.ProcessGroup) -> None:
        end = Endpoint(TorchTransport(group))
        run(end, "all_gather", STATEFUL, 0)
        if end.rank == 1:
            end.streams = Streams()
            with pytest.raises(WireError, match=r"needs codec state \d+, this end of the stream has none"):
                run(end, "all_gather", STATEFUL, 1)
        else:
            run(end, "all_gather", STATEFUL, 1)

    run_threads(rank, WORLD)


def test_streams_of_other_kinds_are_kept_apart() -> None:
    streams = Streams()

    def state(op: str, role: str, numel: int, to: int) -> object:
        ends = Ends.of(streams, 0, Message("dp", op, role, str(STATEFUL), "float32", 4 * numel))
        return ends.sender(STATEFUL, numel, torch.float32, to)

    first = state("all_reduce", "gradient", 100, 1)
    assert first is state("all_reduce", "gradient", 100, 1)
    others = [("all_gather", "gradient", 100, 1), ("all_reduce", "parameter", 100, 1)]
    others += [("all_reduce", "gradient", 101, 1), ("all_reduce", "gradient", 100, 2)]
    assert all(state(*other) is not first for other in others)
    # A receiver may not know the role of a message from peer to peer.
    assert state("send", "activation", 100, 1) is state("send", "unknown", 100, 1)


def test_codecs_without_state_have_none() -> None:
    ends = Ends(Streams(), 0, "")
    assert ends.sender(parse("int4"), 100, torch.float32, 1) is None
    assert ends.receiver(STATELESS, 100, torch.float32, 1, 0) is None
    assert ends.streams.dump() == {}


@pytest.mark.parametrize(
    "dumped",
    [
        {"int4 x": {}},
        {"exponent:reuse=8 x": {}},
        {"exponent:reuse=8 x": {"lengths": "00", "drop": 0, "uses": 1, "rate": 2}},
        {"nonsense": 1},
    ],
)
def test_damaged_states_are_refused_whole(dumped: dict[str, Any]) -> None:
    streams = Streams()
    with pytest.raises(CheckpointError):
        streams.load(dumped)
    assert streams.dump() == {}
