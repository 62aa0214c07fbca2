"""Processes that share a machine, or its network, tell so."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from thinwire import machine

_TELL = "from thinwire.machine import kernel, network; print(kernel(), network())"


def test_another_process_of_this_machine_tells_the_same() -> None:
    told = subprocess.run([sys.executable, "-c", _TELL], capture_output=True, text=True, check=True).stdout
    assert told.split() == [machine.kernel(), machine.network()]


def test_without_a_kernel_to_ask_it_is_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    assert machine.kernel() == socket.gethostname()
    monkeypatch.setattr(os, "stat", missing)
    assert machine.network() == socket.gethostname()
