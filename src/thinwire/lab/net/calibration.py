"""Measure what an emulated link really carries, by message size, and refuse one that is not what it claims."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import NetworkError
from .network import Network
from .rate import format_rate
from .shape import FRAME_BYTES, SEGMENT_BYTES

_SCRIPT = Path(__file__).with_name("peer.py")
_PINGS = 15
_WARM_MAX_BYTES = 8 << 20
_REPEATS = 7
_SIZE_BUDGET_S = 0.8  # time for all repeats of one size; longer sizes are left out
_END_TIMEOUT_S = 5.0

SIZES = tuple(1 << k for k in range(12, 24))
CHECKED_FROM_BYTES = 64 << 10
TOLERANCE = 0.10


@dataclass(frozen=True)
class Sample:
    """Several transfers of ``nbytes`` bytes of payload between two hosts.

    seconds: median, from the first byte sent to the arrival of an answer to the last; shortest_s: the shortest.
    both: each way at the same time, nbytes each. goodput_bit_s: payload bits one way per median second.
    """

    nbytes: int
    seconds: float
    shortest_s: float
    goodput_bit_s: float
    both: bool
    repeats: int


@dataclass(frozen=True)
class Calibration:
    """What the path from one host to another carried.

    bit_s: rate asked for, None for no limit. latency_s: asked for, one way. round_trip_s: shortest seen, one byte
    each way.
    """

    source: int
    target: int
    bit_s: int | None
    latency_s: float
    round_trip_s: float
    samples: tuple[Sample, ...]

    def describe(self) -> dict[str, Any]:
        """The measurements as plain values, for results."""
        return asdict(self)


def wire_seconds(nbytes: int, bit_s: int) -> float:
    """Time that nbytes of TCP payload take at the rate: nbytes * 1514/1448 * 8 / bit_s.

    1514 bytes of frame carry 1448 bytes of payload, so the best goodput is 95.6 % of the rate.
    """
    return nbytes * FRAME_BYTES / SEGMENT_BYTES * 8 / bit_s


def calibrate(
    network: Network, source: int = 0, target: int = 1, sizes: Sequence[int] = SIZES
) -> Calibration:
    """Goodput from ``source`` to ``target`` by message size over TCP, one way and both ways at once.

    A few seconds: sizes whose transfer would take longer than 0.8 s at the rate are left out, except the
    smallest that ``check`` looks at. The two processes run at real-time priority where that is allowed: what is
    measured is the link; ranks of a busy machine may get less out of it. Raises NetworkError when the hosts do
    not reach each other.
    """
    bit_s = network.topology.path_bit_s(source, target)
    jobs: list[tuple[int, int, bool]] = []
    for nbytes in sizes:
        seconds = wire_seconds(nbytes, bit_s) + 2 * network.topology.latency_s if bit_s else 0.0
        repeats = min(_REPEATS, int(_SIZE_BUDGET_S / seconds)) if seconds else _REPEATS
        if repeats or nbytes == CHECKED_FROM_BYTES:
            jobs += [(nbytes, max(1, repeats), False)]
    both_ways = [job for job in jobs if job[0] >= CHECKED_FROM_BYTES]
    jobs += [(nbytes, repeats, True) for nbytes, repeats, _ in both_ways[:: max(1, len(both_ways) - 1)]]
    # The windows of a connection grow with its first bytes; training meets them grown.
    warm = min(_WARM_MAX_BYTES, bit_s // 80) if bit_s else _WARM_MAX_BYTES
    times = _run(network, source, target, [(warm, 1, False), (warm, 1, True), (1, _PINGS, False), *jobs])[2:]
    samples = tuple(
        Sample(nbytes, median, min(seconds), nbytes * 8 / median, both, repeats)
        for (nbytes, repeats, both), seconds in zip(jobs, times[1:], strict=True)
        for median in (statistics.median(seconds),)
    )
    return Calibration(source, target, bit_s, network.topology.latency_s, min(times[0]), samples)


def check(calibration: Calibration) -> tuple[str, ...]:
    """Refuse a link that is not what it claims: NetworkError.

    The shortest one-way transfer of every size of 64 KiB and more must lie between 0.9 * (wire_seconds + twice
    the latency asked for), else bytes ride free, and 1.1 * (wire_seconds + the round trip measured), else the
    rate is not reached. It is the shortest because other load on the machine can only lengthen a transfer.
    Returns a note for each size whose median is over the limit: the link is right, but the machine was busy.
    """
    if calibration.bit_s is None:
        return ()
    off: list[str] = []
    notes: list[str] = []
    for sample in calibration.samples:
        if sample.both or sample.nbytes < CHECKED_FROM_BYTES:
            continue
        wire_s = wire_seconds(sample.nbytes, calibration.bit_s)
        least_s = (1 - TOLERANCE) * (wire_s + 2 * calibration.latency_s)
        most_s = (1 + TOLERANCE) * (wire_s + calibration.round_trip_s)
        for seconds, found, word in ((sample.shortest_s, off, "shortest"), (sample.seconds, notes, "median")):
            if not least_s <= seconds <= most_s:
                limits = f"{least_s * 1e3:.3f} .. {most_s * 1e3:.3f} ms"
                found.append(
                    f"{sample.nbytes} bytes took {seconds * 1e3:.3f} ms ({word} time, limits {limits})"
                )
    if off:
        raise NetworkError(
            f"the link between hosts {calibration.source} and {calibration.target} is not "
            f"{format_rate(calibration.bit_s)}: {'; '.join(off)}; "
            "use a lower rate, or a machine with less else to do"
        )
    return tuple(notes)


def _run(
    network: Network, source: int, target: int, jobs: Sequence[tuple[int, int, bool]]
) -> list[list[float]]:
    python = (sys.executable, "-I", str(_SCRIPT))
    address = network.address(target)
    with _started(network.command(target, *python, "serve", address)) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        if not port:
            raise NetworkError(f"calibration could not listen on host {target}: {_last_line(server)}")
        with _started(network.command(source, *python, "measure", address, port)) as client:
            lines = "".join(json.dumps(job) + "\n" for job in jobs)
            try:
                output, _ = client.communicate(lines, timeout=_timeout_s(network, source, target, jobs))
            except subprocess.TimeoutExpired:
                output = ""
            times: list[list[float]] = [json.loads(line) for line in output.splitlines()]
            if len(times) != len(jobs):
                raise NetworkError(
                    f"calibration from host {source} to host {target} ended after {len(times)} of {len(jobs)} "
                    "sizes: the hosts do not reach each other"
                )
            return times


def _timeout_s(network: Network, source: int, target: int, jobs: Sequence[tuple[int, int, bool]]) -> float:
    bit_s = network.topology.path_bit_s(source, target) or 10**9
    trip_s = 2 * network.topology.latency_s
    return 30.0 + 4 * sum(repeats * (wire_seconds(nbytes, bit_s) + trip_s) for nbytes, repeats, _ in jobs)


def _last_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    lines = process.stderr.read().strip().splitlines()
    return lines[-1] if lines else "no message"


@contextmanager
def _started(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    except BaseException:
        process.kill()
        raise
    finally:
        with suppress(BrokenPipeError):
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
