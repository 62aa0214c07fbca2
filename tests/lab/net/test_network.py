from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from thinwire.errors import NetworkError
from thinwire.lab.net import HostCounters, Network, Topology
from thinwire.lab.net.namespace import existing
from thinwire.launch import run_ranks

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("netlab")]

_SERVE = """
import socket, sys
with socket.create_server(("0.0.0.0", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    sock = listener.accept()[0]
    while sock.recv(1 << 16):
        pass
    sock.sendall(b"!")
"""
_SEND = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[4]))
sock.sendall(bytes(int(sys.argv[3])))
sock.shutdown(socket.SHUT_WR)
assert sock.recv(1) == b"!"
"""


def _send(network: Network, source: int, target: int, nbytes: int, timeout_s: float = 20.0) -> bool:
    """Whether nbytes from one host reach another over TCP."""
    python = (sys.executable, "-I", "-c")
    pipe = subprocess.PIPE
    with subprocess.Popen(network.command(target, *python, _SERVE), stdout=pipe, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        argv = network.command(
            source, *python, _SEND, network.address(target), port, str(nbytes), str(timeout_s)
        )
        sent = subprocess.run(argv, capture_output=True).returncode == 0
        if not sent:
            server.kill()
    return sent


def _sent(before: HostCounters, after: HostCounters) -> tuple[int, int]:
    return after.tx_bytes - before.tx_bytes, after.rx_bytes - before.rx_bytes


def _sum_and_name(rank: int, world: int, report: Any) -> tuple[float, str]:
    x = torch.full((1000,), float(rank + 1))
    dist.all_reduce(x)
    return float(x[0]), ",".join(name for _, name in socket.if_nameindex())


def test_ranks_reach_each_other_across_uneven_hosts() -> None:
    with Network(Topology(hosts=2, ranks_per_host=(2, 1), rate="100mbit")) as network:
        places = network.places()
        assert [place.netns for place in places] == [network.netns(0), network.netns(0), network.netns(1)]
        results = run_ranks(_sum_and_name, 3, places=places, preload=("thinwire.lab.net",))
        counters = network.counters()
    assert [total for total, _ in results] == [6.0] * 3
    assert all(names == "lo,eth0" for _, names in results)
    assert all(counter.tx_bytes > 4000 for counter in counters)


def test_counters_agree_with_the_bytes_sent() -> None:
    # DeepSpeed 4886
    nbytes = 1 << 20
    with Network(Topology(hosts=2, rate="200mbit")) as network:
        before = network.counters()
        assert _send(network, 0, 1, nbytes)
        after = network.counters()
    out, back = _sent(before[0], after[0])
    frames = -(-nbytes // 1448)
    # Every frame carries 66 bytes of headers; a few more of them open and close the connection. A sender that
    # is scheduled out may leave frames that are not full, hence a second bound and not equality.
    assert nbytes + 66 * frames <= out <= nbytes * 1.08
    assert back <= 66 * 2 * frames
    assert _sent(before[1], after[1]) == (back, out)
    assert all(c.tx_drops == c.rx_drops == 0 for c in after)


def test_loopback_of_a_host_is_not_shaped() -> None:
    with Network(Topology(hosts=1, ranks_per_host=2, rate="100kbit")) as network:
        before = network.counters()[0]
        # At 100 kbit/s these 8 MiB would take eleven minutes.
        assert _send(network, 0, 0, 8 << 20)
        assert _sent(before, network.counters()[0]) == (0, 0)


def test_groups_are_joined_by_their_uplinks() -> None:
    topology = Topology(hosts=3, groups=(2, 1), rate="500mbit", uplink="100mbit")
    with Network(topology) as network:
        assert _send(network, 0, 1, 100_000)
        assert _send(network, 0, 2, 100_000)
        assert _send(network, 2, 1, 100_000)


def test_a_cut_link_loses_frames_until_it_is_restored() -> None:
    with Network(Topology(hosts=2)) as network:
        assert _send(network, 0, 1, 1000)
        network.cut(1)
        assert not _send(network, 0, 1, 1000, timeout_s=0.5)
        assert _send(network, 1, 1, 1000)
        network.restore(1)
        assert _send(network, 0, 1, 1000)


def test_two_networks_at_once_do_not_meet() -> None:
    with Network(Topology(hosts=2)) as one, Network(Topology(hosts=2)) as other:
        assert one.address(0) == other.address(0)
        assert _send(one, 0, 1, 1000)
        one.cut(1)
        assert _send(other, 0, 1, 1000)


def test_an_exception_takes_the_network_down() -> None:
    class Stop(Exception):
        pass

    network = Network(Topology(hosts=2, rate="10mbit", latency_s=0.001))
    with pytest.raises(Stop) as stopped, network:
        raise Stop(existing(network.netns(0)[:-2]))
    assert len(stopped.value.args[0]) == 3
    assert not set(stopped.value.args[0]) & set(existing())
    with pytest.raises(NetworkError, match="not up"):
        network.places()


def test_a_network_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(Topology(hosts=2, rate="10mbit"))
    before = existing()

    def fail(host: int, rate: int | None) -> None:
        raise NetworkError("half way")

    monkeypatch.setattr(network, "_make_host", fail)
    with pytest.raises(NetworkError, match="half way"):
        network.__enter__()
    assert existing() == before


def test_the_description_says_what_was_emulated() -> None:
    with Network(Topology(hosts=2, rate="200mbit")) as network:
        description = network.description()
    assert description["emulation"] == "netns"
    assert description["rate"] == "200mbit"
    assert description["latency_by"] == "none"
    assert description["bandwidth_only"] is True


def test_hosts_that_do_not_exist_are_refused() -> None:
    with Network(Topology(hosts=2)) as network, pytest.raises(NetworkError, match=r"0 \.\. 1"):
        network.cut(2)
