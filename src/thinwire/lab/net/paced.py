"""Without root: senders that wait, so that together they keep a rate. Not a network; results name it "paced".

Ranks on one host share its link through a file that holds one number: the time at which the link is next
free, on the clock that all processes of a machine share (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import SpecError, UnsupportedError
from .shape import MAX_BURST_BYTES, burst_bytes
from .topology import Topology

_CLOCK = struct.Struct("d")


class Pacer:
    """A token bucket that all processes that open the same ``path`` share.

    rate_bit_s: bits per second of payload and whatever else the caller counts. burst: bytes that pass at once
    on an idle link, at most 16 KiB; None: as the shaped links have. The file is made where it is missing.
    Raises SpecError for a rate that is not positive or a burst outside 1 .. 16384.
    """

    def __init__(self, path: str | Path, rate_bit_s: int, burst: int | None = None) -> None:
        if rate_bit_s <= 0:
            raise SpecError(f"a paced rate of {rate_bit_s} bit/s must be positive")
        self.rate_bit_s = rate_bit_s
        self.burst = burst_bytes(rate_bit_s) if burst is None else burst
        if not 1 <= self.burst <= MAX_BURST_BYTES:
            raise SpecError(f"a burst of {self.burst} bytes is outside 1 .. {MAX_BURST_BYTES}")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self._file_lock():
            if os.fstat(self._fd).st_size < _CLOCK.size:
                os.pwrite(self._fd, _CLOCK.pack(-math.inf), 0)
        self._map = mmap.mmap(self._fd, _CLOCK.size)
        self._threads = threading.Lock()

    def delay(self, nbytes: int) -> float:
        """Take the link for nbytes and return the seconds until their last bit has left (0: at once)."""
        return max(0.0, self._take(nbytes, None) - time.monotonic())

    def wait(self, nbytes: int) -> None:
        """Take the link for nbytes, piece by piece so that others get their share, and wait for the last bit."""
        wait_all((self,), nbytes)

    def _take(self, nbytes: int, busy_until: float | None) -> float:
        """Take the link and return when nbytes have left. busy_until: end of what this sender took just before,
        None when it starts.

        A link that stood idle has saved up tokens for one burst. A sender that came back late from waiting
        for its own piece was never idle: it goes on where it ended, so that a late timer costs no rate.
        """
        with self._threads, self._file_lock():
            (free,) = _CLOCK.unpack_from(self._map)
            idle_credit = time.monotonic() - self.burst * 8 / self.rate_bit_s
            earliest = idle_credit if busy_until is None else min(idle_credit, busy_until)
            done: float = max(free, earliest) + nbytes * 8 / self.rate_bit_s
            _CLOCK.pack_into(self._map, 0, done)
            return done

    @contextmanager
    def _file_lock(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the file; it stays for the others."""
        self._map.close()
        os.close(self._fd)


def wait_all(pacers: tuple[Pacer, ...], nbytes: int) -> None:
    """Wait until nbytes have passed all the links of a path, which carry it at the same time."""
    taken: list[float | None] = [None] * len(pacers)
    piece_limit = min((pacer.burst for pacer in pacers), default=nbytes)
    left = nbytes if pacers else 0
    while left > 0:
        piece = min(left, piece_limit)
        ends = [pacer._take(piece, before) for pacer, before in zip(pacers, taken, strict=True)]
        taken = [*ends]
        left -= piece
        pause_s = max(ends) - time.monotonic()
        if pause_s > 0:
            time.sleep(pause_s)


class PacedNetwork:
    """The links of ``topology`` as pacers in ``folder``, for the ranks of one machine. Needs no root.

    One object in each rank, all with the same folder (empty when the run starts). Only bytes passed to
    ``wait`` are paced, and nothing checks that they are all; latency is not emulated.
    Raises UnsupportedError for a topology with latency_s.
    """

    def __init__(self, topology: Topology, folder: str | Path) -> None:
        if topology.latency_s > 0:
            raise UnsupportedError(
                f"a paced network has no latency, latency_s is {topology.latency_s}: set it to 0, or use Network"
            )
        self.topology = topology
        self._folder = Path(folder)
        self._pacers: dict[str, Pacer] = {}

    def wait(self, source: int, target: int, nbytes: int) -> None:
        """Wait as long as nbytes from rank ``source`` to rank ``target`` take; within a host not at all."""
        hosts = self.topology.host_of_rank
        wait_all(self._path(hosts[source], hosts[target]), nbytes)

    def _path(self, source: int, target: int) -> tuple[Pacer, ...]:
        if source == target:
            return ()
        links = [
            (f"host{source}.tx", self.topology.link_bit_s[source]),
            (f"host{target}.rx", self.topology.link_bit_s[target]),
        ]
        groups = self.topology.group_of_host
        if groups[source] != groups[target]:
            links.append((f"group{groups[source]}.tx", self.topology.uplink_bit_s))
            links.append((f"group{groups[target]}.rx", self.topology.uplink_bit_s))
        return tuple(self._pacer(name, rate) for name, rate in links if rate is not None)

    def _pacer(self, name: str, rate: int) -> Pacer:
        if name not in self._pacers:
            self._pacers[name] = Pacer(self._folder / name, rate)
        return self._pacers[name]

    def close(self) -> None:
        """Let go of all files."""
        for pacer in self._pacers.values():
            pacer.close()
        self._pacers.clear()

    def description(self) -> dict[str, Any]:
        """What was emulated and by what, for results."""
        return {
            "emulation": "paced",
            **self.topology.describe(),
            "latency_by": "none",
            "bandwidth_only": True,
        }
