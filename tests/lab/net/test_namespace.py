from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from thinwire.errors import NetworkError
from thinwire.lab.net import Network, Topology
from thinwire.lab.net.namespace import command, existing, leftovers, owner_prefix, start_ticks, sweep

_FORKS = mp.get_context("forkserver")


def _hold(latency_s: float, line: Connection) -> None:
    # Under nohup and in a shell's background these are ignored, and stay so.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Network(Topology(hosts=2, rate="10mbit", latency_s=latency_s)) as network:
        line.send(network.netns(0))
        line.recv()


def _owner(latency_s: float = 0.0) -> tuple[BaseProcess, str, Connection]:
    """A process that holds a network until it is told to end, the name of its first host, and a line to it."""
    _FORKS.set_forkserver_preload(["thinwire.launch", "thinwire.lab.net"])
    ours, theirs = _FORKS.Pipe()
    process = _FORKS.Process(target=_hold, args=(latency_s, theirs))
    process.start()
    theirs.close()
    return process, ours.recv(), ours


def test_a_process_is_known_by_its_start() -> None:
    assert start_ticks(os.getpid()) == start_ticks(os.getpid())
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert start_ticks(ended.pid) is None


def test_a_command_that_fails_is_shown() -> None:
    with pytest.raises(NetworkError, match="ls /nowhere"):
        command(["ls", "/nowhere"])
    with pytest.raises(NetworkError, match="missing"):
        command(["thinwire-no-such-command"])


@pytest.mark.root
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 1)]
)
def test_signals_take_the_network_down(netlab: None, number: signal.Signals, code: int) -> None:
    process, name, _line = _owner(latency_s=0.001)
    assert name in existing()
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == code
    assert existing(name[:-2]) == []


@pytest.mark.root
def test_what_a_killed_owner_left_is_removed_and_a_living_owners_stays(netlab: None) -> None:
    dead, dead_name, _ = _owner()
    living, living_name, line = _owner()
    dead.kill()
    dead.join()
    assert dead_name in leftovers()
    assert living_name not in leftovers()
    with Network(Topology(hosts=1)):
        assert existing(dead_name[:-2]) == []
        assert living_name in existing()
    line.send("end")
    living.join()
    assert existing(living_name[:-2]) == []


@pytest.mark.root
def test_a_process_id_used_again_is_not_the_owner(netlab: None) -> None:
    start = start_ticks(os.getpid())
    assert start is not None
    name = f"tw{os.getpid()}-{start + 1:x}-0-h0"
    command(["ip", "netns", "add", name])
    assert owner_prefix(0) != name[:-2]
    assert name in sweep()
    assert name not in existing()
