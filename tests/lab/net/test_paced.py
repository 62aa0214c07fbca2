from __future__ import annotations

import multiprocessing as mp
import threading
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from thinwire.errors import SpecError, UnsupportedError
from thinwire.lab.net import PacedNetwork, Pacer, Topology

RATE = 10**7


def _least_seconds(nbytes: int, burst: int) -> float:
    return (nbytes - burst) * 8 / RATE


def test_one_sender_keeps_the_rate(tmp_path: Path) -> None:
    pacer = Pacer(tmp_path / "link", RATE)
    begin = time.monotonic()
    pacer.wait(100_000)
    assert time.monotonic() - begin >= _least_seconds(100_000, pacer.burst)


def test_delays_add_up_and_small_bursts_are_free(tmp_path: Path) -> None:
    pacer = Pacer(tmp_path / "link", RATE, burst=4096)
    assert pacer.delay(100) == 0.0
    first = pacer.delay(1 << 20)
    assert first <= (1 << 20) * 8 / RATE
    assert pacer.delay(1 << 20) > first


def _share(path: str, nbytes: int, barrier: Barrier) -> None:
    pacer = Pacer(path, RATE)
    barrier.wait()
    pacer.wait(nbytes)


def test_two_processes_share_one_link(tmp_path: Path) -> None:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["thinwire.launch", "thinwire.lab.net"])
    barrier = context.Barrier(3)
    args = (str(tmp_path / "link"), 60_000, barrier)
    processes = [context.Process(target=_share, args=args) for _ in range(2)]
    for process in processes:
        process.start()
    barrier.wait()
    begin = time.monotonic()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    burst = Pacer(tmp_path / "link", RATE).burst
    # The barrier may let a process go on before this one has read the clock, by far less than a tenth.
    assert time.monotonic() - begin >= 0.9 * _least_seconds(120_000, burst)


def test_threads_share_one_link(tmp_path: Path) -> None:
    pacer = Pacer(tmp_path / "link", RATE)
    begin = time.monotonic()
    threads = [threading.Thread(target=pacer.wait, args=(30_000,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin >= _least_seconds(90_000, pacer.burst)


def test_a_paced_network_takes_the_links_of_the_path(tmp_path: Path) -> None:
    topology = Topology(hosts=3, ranks_per_host=2, groups=(2, 1), rate="1gbit", uplink="10mbit")
    network = PacedNetwork(topology, tmp_path)
    network.wait(0, 1, 1 << 40)  # one host: not paced
    assert list(tmp_path.iterdir()) == []
    network.wait(0, 2, 1000)
    assert {p.name for p in tmp_path.iterdir()} == {"host0.tx", "host1.rx"}
    begin = time.monotonic()
    network.wait(0, 4, 50_000)
    assert time.monotonic() - begin >= _least_seconds(50_000, 16384)
    assert {p.name for p in tmp_path.iterdir()} >= {"group0.tx", "group1.rx", "host2.rx"}
    assert network.description()["emulation"] == "paced"
    network.close()


def test_what_cannot_be_paced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="latency"):
        PacedNetwork(Topology(latency_s=0.001), tmp_path)
    with pytest.raises(SpecError, match="positive"):
        Pacer(tmp_path / "link", 0)
    with pytest.raises(SpecError, match="16384"):
        Pacer(tmp_path / "link", RATE, burst=16385)
