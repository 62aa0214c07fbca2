from __future__ import annotations

import os

import pytest

from thinwire.errors import NetworkError
from thinwire.lab.net import Network, Topology, calibrate
from thinwire.lab.net.delay import Relay, kernel_has_netem
from thinwire.lab.net.namespace import command, existing, owner_prefix, remove

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("netlab")]


@pytest.fixture(autouse=True)
def _latency_is_possible(netlab: None) -> None:
    if not os.path.exists("/dev/net/tun") and not kernel_has_netem(owner_prefix(99)):
        pytest.skip("neither netem nor /dev/net/tun")


def test_latency_is_added_each_way_and_the_rate_is_not_passed() -> None:
    with Network(Topology(hosts=2, rate="200mbit", latency_s=0.004)) as network:
        assert network.latency_by in ("netem", "relay")
        assert network.description()["bandwidth_only"] is False
        calibration = calibrate(network, sizes=(256 << 10,))
    assert calibration.round_trip_s >= 2 * 0.004
    assert calibration.samples[0].goodput_bit_s <= 200_000_000


def test_a_relay_that_cannot_start_says_what_to_do() -> None:
    prefix = owner_prefix(98)
    with pytest.raises(NetworkError, match="latency_s = 0"):
        Relay(f"{prefix}h0", "eth0", f"{prefix}sw", "p0", 0.001)


def test_a_relay_ends_with_its_devices() -> None:
    prefix = owner_prefix(97)
    names = [f"{prefix}h0", f"{prefix}sw"]
    try:
        for name in names:
            command(["ip", "netns", "add", name])
        relay = Relay(names[0], "eth0", names[1], "p0", 0.001)
        assert "eth0" in command(["ip", "-n", names[0], "link", "show"])
        assert "p0" in command(["ip", "-n", names[1], "link", "show"])
        relay.close()
        assert "eth0" not in command(["ip", "-n", names[0], "link", "show"])
        assert "p0" not in command(["ip", "-n", names[1], "link", "show"])
    finally:
        remove(existing(prefix))
