"""Where the ranks of an experiment run: hosts of an emulated network, or this machine as it is."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..collectives.topology import Topology as Places
from ..errors import LayoutError, NetworkError
from ..group import GroupOptions
from ..launch import Place, run_ranks
from . import paced_group
from .mpirun import Mpirun, run_mpi_ranks
from .net import Calibration, Network, Topology, available, calibrate, check, parse_rate
from .paced_group import PacedOptions
from .wiring import Wiring

_PRELOAD = ("thinwire.lab.train.trainer", "thinwire.lab.compare.rank")


@dataclass(frozen=True)
class Cluster:
    """Places for ranks, and what is known of the link between their hosts.

    emulation: ``netns`` (kernel-shaped links), ``paced`` (senders wait) or ``none``. paced_folder: where the
    ranks' pacers meet, if paced. calibration: what the link carried before the run. mpirun: what starts the ranks, and then
    carries their messages; None: they are started here, and gloo carries them.
    """

    topology: Topology
    emulation: str
    note: str
    places: tuple[Place, ...] | None
    calibration: Calibration | None
    paced_folder: str | None = None
    mpirun: Mpirun | None = None

    @property
    def world(self) -> int:
        return self.topology.world

    @property
    def wiring(self) -> Wiring:
        """What ranks need to make groups whose messages go over this cluster's links."""
        hosts = set(self.topology.rank_counts)
        per_host = hosts.pop() if len(hosts) == 1 else 1  # of different sizes: as if no rank had a neighbour
        if self.mpirun is not None:
            return Wiring(options=GroupOptions(backend="mpi"), ranks_per_host=per_host)
        if self.paced_folder is None:
            return Wiring(ranks_per_host=per_host)
        names = Places.of_hosts([str(host) for host in self.topology.host_of_rank])
        options = PacedOptions(topology=self.topology, folder=self.paced_folder, hosts=names)
        return Wiring(paced_group.BACKEND, options, per_host)

    def link(self) -> dict[str, Any]:
        """The link as ``result.json`` holds it."""
        rate = self.topology.rate
        bit_s = self.topology.link_bit_s[0] if self.emulation != "none" else None
        return {
            "spec": str(rate) if self.emulation != "none" else "none",
            "rate_bit_s": bit_s,
            "latency_s": self.topology.latency_s,
            "emulation": self.emulation,
            "note": self.note,
        }

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float,
        collective_timeout: float = 300.0,
        on_message: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Run ``fn`` in every rank, see :func:`thinwire.launch.run_ranks` and :func:`.mpirun.run_mpi_ranks`."""
        if self.mpirun is not None:
            return run_mpi_ranks(
                fn,
                self.world,
                *args,
                timeout=timeout,
                collective_timeout=collective_timeout,
                mpirun=self.mpirun,
                places=self.places,
                on_message=on_message,
            )
        return run_ranks(
            fn,
            self.world,
            *args,
            timeout=timeout,
            collective_timeout=collective_timeout,
            places=self.places,
            on_message=on_message,
            preload=_PRELOAD,
        )


def spread(world: int, hosts: int) -> tuple[int, ...]:
    """Ranks per host, contiguous; the first hosts hold one more if the division leaves a rest."""
    if not 1 <= hosts <= world:
        raise LayoutError(f"{world} ranks cannot be put on {hosts} hosts; use 1 to {world}")
    return tuple(world // hosts + (host < world % hosts) for host in range(hosts))


@contextmanager
def cluster(
    world: int,
    hosts: int,
    link: str,
    *,
    latency_s: float = 0.0,
    paced: bool = False,
    mpirun: Mpirun | None = None,
) -> Iterator[Cluster]:
    """Hosts for ``world`` ranks with links of rate ``link`` ("200mbit"; "none": this machine's loopback).

    Measures the link and refuses one that is not what it claims. paced: let senders wait instead of shaping,
    for machines without root; every output names it. mpirun: let it start the ranks (see :class:`Cluster`).
    Raises NetworkError where shaping is not possible and paced was not asked for, LayoutError if the ranks do
    not fit the hosts.
    """
    topology = Topology(hosts, spread(world, hosts), rate=link, latency_s=latency_s)
    if parse_rate(link) is None:
        between = "the loopback" if mpirun is None else "what MPI has within a host"
        note = f"no network was emulated: ranks talk over {between}"
        yield Cluster(topology, "none", note, None, None, mpirun=mpirun)
        return
    if paced:
        with tempfile.TemporaryDirectory(prefix="thinwire-paced-") as folder:
            note = "paced transport: senders wait, no packet is shaped; an approximation of a network"
            yield Cluster(topology, "paced", note, None, None, folder)
        return
    reason = available()
    if reason is not None:
        raise NetworkError(
            f"links of {link} need an emulated network: {reason}. Run as root, or, where a command has it, with --paced"
        )
    with Network(topology) as network:
        calibration, notes = None, []
        if hosts > 1:
            calibration = calibrate(network)
            notes = list(check(calibration))
        if latency_s == 0:
            notes.insert(0, "bandwidth only: no latency was added")
        yield Cluster(topology, "netns", "; ".join(notes), network.places(), calibration, mpirun=mpirun)


def calibration_rows(found: Calibration | None) -> Sequence[dict[str, Any]]:
    """The one-way samples as ``result.json`` holds them."""
    if found is None:
        return []
    keys = ("nbytes", "seconds", "goodput_bit_s")
    return [{key: getattr(s, key) for key in keys} for s in found.samples if not s.both]


def interface_tx_bytes(interface: str) -> int | None:
    """Bytes that this process's network namespace has sent over an interface, or None if it has no such one."""
    # /proc/net is that of the reading process's namespace, unlike /sys.
    with contextlib.suppress(OSError), open("/proc/net/dev") as lines:
        for line in lines:
            name, colon, rest = line.partition(":")
            if colon and name.strip() == interface:
                return int(rest.split()[8])
    return None
