"""What processes of one machine have alike, told by its kernel."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def kernel() -> str:
    """The same for processes that share cores: the boot of their kernel, or the host's name where there is none to read."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def network() -> str:
    """The same for processes that share a loopback interface: one kernel, one network namespace."""
    with suppress(OSError):
        return f"{kernel()}/{os.stat('/proc/self/ns/net').st_ino}"
    return kernel()
