"""An emulated network: one network namespace per host, one for the switch, shaped links between them."""

from __future__ import annotations

import atexit
import itertools
import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import NetworkError
from ...launch import Place
from . import namespace
from .delay import Relay, kernel_has_netem
from .endings import ending_signals_raise, ending_signals_wait
from .shape import burst_bytes, gso_lines, qdisc_lines
from .topology import Topology

INTERFACE = "eth0"
# Without IPv6 nothing but the ranks' traffic is on the links. Windows that start large, and stay open over a
# phase of computing, keep TCP's own start-up out of what is measured, as clusters are tuned.
_SYSCTLS = (
    ("ipv6/conf/all/disable_ipv6", "1"),
    ("ipv6/conf/default/disable_ipv6", "1"),
    ("ipv4/tcp_rmem", "4096 4194304 33554432"),
    ("ipv4/tcp_wmem", "4096 4194304 4194304"),
    ("ipv4/tcp_slow_start_after_idle", "0"),
    ("ipv4/tcp_no_metrics_save", "1"),
)
_number = itertools.count()


@dataclass(frozen=True)
class HostCounters:
    """Bytes on the link of a host since it was made, headers of every frame included, and lost frames.

    tx: from the host to the switch; rx: from the switch to the host. Loopback traffic is not in them.
    """

    tx_bytes: int
    rx_bytes: int
    tx_drops: int
    rx_drops: int


class Network:
    """Context manager: makes the hosts of ``topology`` on entry, removes them on exit.

    Every host is a namespace with a loopback and ``eth0``, joined to a switch in a namespace of its own;
    nothing touches the caller's network. Links are shaped in both directions. latency_s is added to what
    leaves a host, by the kernel's netem where there is one, else by a relay process per host; ``latency_by``
    says which. Removal happens on exit, on an exception, on SIGINT, SIGTERM and SIGHUP; what an owner that was
    killed outright left behind is removed by the next Network. Needs root and iproute2.

    Raises NetworkError when the network cannot be made; nothing is left behind then.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.latency_by = "none"
        self.tcp = ""
        self._prefix = ""
        self._owner = 0
        self._relays: list[Relay] = []
        self._signals = ExitStack()

    def __enter__(self) -> Network:
        if self._prefix:
            raise NetworkError("this Network is in use already; make another one")
        if os.geteuid() != 0:
            raise NetworkError(
                "an emulated network needs root (user id is not 0); use PacedNetwork without it"
            )
        namespace.sweep()
        self._owner = os.getpid()
        self._prefix = namespace.owner_prefix(next(_number))
        self._signals.enter_context(ending_signals_raise())
        atexit.register(self.close)
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the network; does nothing where there is none, or in a process forked from its owner."""
        if not self._prefix or os.getpid() != self._owner:
            return
        try:
            with ending_signals_wait():
                for relay in self._relays:
                    relay.close()
                self._relays.clear()
                namespace.remove(namespace.existing(self._prefix))
                self._prefix = ""
                atexit.unregister(self.close)
        finally:
            self._signals.close()

    def netns(self, host: int) -> str:
        """Name of the namespace of a host."""
        if not self._prefix:
            raise NetworkError("the network is not up: use it as 'with Network(topology) as network'")
        if not 0 <= host < self.topology.hosts:
            raise NetworkError(f"host {host} is not one of 0 .. {self.topology.hosts - 1}")
        return f"{self._prefix}h{host}"

    def address(self, host: int) -> str:
        """IPv4 address of a host's ``eth0``."""
        self.netns(host)
        return f"10.77.0.{host + 1}"

    def command(self, host: int, *argv: str) -> list[str]:
        """The command line that runs ``argv`` on a host."""
        return ["ip", "netns", "exec", self.netns(host), *argv]

    def places(self) -> tuple[Place, ...]:
        """Where each rank runs, in rank order, for ``run_ranks``."""
        hosts = self.topology.host_of_rank
        return tuple(Place(self.netns(host), INTERFACE, self.address(host)) for host in hosts)

    def counters(self) -> tuple[HostCounters, ...]:
        """What went over the link of each host since it was made."""
        switch = _root_counts(self._switch)
        result = []
        for host in range(self.topology.hosts):
            tx_bytes, tx_drops = _root_counts(self.netns(host))[INTERFACE]
            rx_bytes, rx_drops = switch[f"p{host}"]
            result.append(HostCounters(tx_bytes, rx_bytes, tx_drops, rx_drops))
        return tuple(result)

    def cut(self, host: int) -> None:
        """Cut the link of a host: frames vanish in both directions, as with a pulled cable.

        Connections live on: TCP sends again until it gives up, which takes minutes.
        """
        self.netns(host)
        namespace.batch("ip", [f"link set dev p{host} down"], self._switch)

    def restore(self, host: int) -> None:
        """Restore the link of a host that was cut. TCP notices with its next attempt, after up to as long again."""
        self.netns(host)
        namespace.batch("ip", [f"link set dev p{host} up"], self._switch)

    def description(self) -> dict[str, Any]:
        """What was emulated and by what, for results."""
        limited = [
            rate for rate in (*self.topology.link_bit_s, self.topology.uplink_bit_s) if rate is not None
        ]
        return {
            "emulation": "netns",
            **self.topology.describe(),
            "burst_bytes": [burst_bytes(rate) for rate in sorted(set(limited))],
            "latency_by": self.latency_by,
            "bandwidth_only": self.latency_by == "none",
            "tcp": self.tcp,
        }

    @property
    def _switch(self) -> str:
        if not self._prefix:
            raise NetworkError("the network is not up: use it as 'with Network(topology) as network'")
        return f"{self._prefix}sw"

    def _make(self) -> None:
        topology = self.topology
        hosts = range(topology.hosts)
        names = [self.netns(host) for host in hosts]
        namespace.batch("ip", [f"netns add {name}" for name in (self._switch, *names)])
        for name in (self._switch, *names):
            namespace.set_sysctls(name, _SYSCTLS)
        if topology.latency_s > 0:
            self.latency_by = "netem" if kernel_has_netem(self._prefix) else "relay"
        self._make_bridges()
        if self.latency_by == "relay":
            for host in hosts:
                self._relays.append(
                    Relay(names[host], INTERFACE, self._switch, f"p{host}", topology.latency_s)
                )
        else:
            namespace.batch(
                "ip",
                [
                    f"link add name {INTERFACE} netns {names[host]} type veth peer name p{host} netns {self._switch}"
                    for host in hosts
                ],
            )
        switch_ip, switch_tc = [], []
        for host, (group, rate) in enumerate(zip(topology.group_of_host, topology.link_bit_s, strict=True)):
            switch_ip.append(f"link set dev p{host} master br{group} up")
            switch_tc += qdisc_lines(f"p{host}", rate)
            self._make_host(host, rate)
        namespace.batch("ip", switch_ip, self._switch)
        namespace.batch("tc", switch_tc, self._switch)

    def _make_bridges(self) -> None:
        """One bridge per group and, with several groups, a core bridge that their uplinks lead to."""
        ip, tc = ["link set dev lo up"], []
        groups = sorted(set(self.topology.group_of_host))
        bridges = [f"br{group}" for group in groups] + (["core"] if len(groups) > 1 else [])
        for bridge in bridges:
            # Without a forwarding delay or learning of multicast groups a port forwards at once.
            ip.append(f"link add {bridge} type bridge stp_state 0 forward_delay 0 mcast_snooping 0")
            ip.append(f"link set dev {bridge} up")
        for group in groups if len(groups) > 1 else []:
            ip.append(f"link add name up{group} type veth peer name down{group}")
            ip.append(f"link set dev up{group} master br{group} up")
            ip.append(f"link set dev down{group} master core up")
            for end in (f"up{group}", f"down{group}"):
                tc += qdisc_lines(end, self.topology.uplink_bit_s)
        namespace.batch("ip", ip, self._switch)
        namespace.batch("tc", tc, self._switch)

    def _make_host(self, host: int, rate: int | None) -> None:
        name, address = self.netns(host), self.address(host)
        netem_s = self.topology.latency_s if self.latency_by == "netem" else 0.0
        available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
        # Cubic is a cluster's usual choice, and BBR paces by a timer and would fight the token bucket.
        self.tcp = next((c for c in ("cubic", "reno") if c in available), "default")
        congestion = "" if self.tcp == "default" else f" congctl {self.tcp}"
        namespace.batch("tc", qdisc_lines(INTERFACE, rate, netem_s), name)
        namespace.batch(
            "ip",
            [
                "link set dev lo up",
                *gso_lines(INTERFACE, rate),
                f"addr add {address}/16 dev {INTERFACE}",
                f"link set dev {INTERFACE} up",
                f"route replace 10.77.0.0/16 dev {INTERFACE} proto kernel scope link src {address}{congestion}",
            ],
            name,
        )


def _root_counts(netns: str) -> dict[str, tuple[int, int]]:
    """Per device of a namespace: bytes and lost frames of its root queueing discipline."""
    text = namespace.command(["tc", "-n", netns, "-s", "-j", "qdisc", "show"])
    entries = (entry for entry in json.loads(text) if entry.get("root"))
    return {entry["dev"]: (int(entry["bytes"]), int(entry["drops"])) for entry in entries}
