"""Network namespaces by name: make, remove, and sweep those whose owner is dead.

A name is ``tw<pid>-<start>-<n>-<part>``: the owner's process id, its start time in clock ticks since boot
(hexadecimal: process ids are used again, the pair is not), the owner's n-th network, and the part of it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...errors import NetworkError

_FOLDER = Path("/var/run/netns")
_NAME = re.compile(r"tw([0-9]+)-([0-9a-f]+)-[0-9]+-[a-z]+[0-9]*")
_COMMAND_TIMEOUT_S = 30.0


def command(argv: Sequence[str], stdin: str = "") -> str:
    """Run a command and return what it printed. Raises NetworkError with its message when it fails."""
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            start_new_session=True,  # a Ctrl-C of the terminal must not end the command half done
        )
    except FileNotFoundError:
        raise NetworkError(f"command {argv[0]!r} is missing: install iproute2") from None
    except subprocess.TimeoutExpired:
        raise NetworkError(f"{' '.join(argv)} did not end within {_COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        sent = f" with input:\n{stdin.rstrip()}\n" if stdin else " "
        raise NetworkError(f"{' '.join(argv)} failed{sent}({done.stderr.strip() or done.returncode})")
    return done.stdout


def batch(tool: str, lines: Iterable[str], netns: str | None = None) -> None:
    """Feed lines to ``ip`` or ``tc`` in one process; the first that fails stops it (NetworkError)."""
    text = "\n".join(lines)
    if text:
        command([tool, *(("-n", netns) if netns else ()), "-batch", "-"], text + "\n")


def set_sysctls(netns: str, values: Iterable[tuple[str, str]]) -> None:
    """Write values under /proc/sys/net of a namespace; paths that the kernel lacks are left out."""
    writes = "; ".join(f"if [ -e {path} ]; then echo '{value}' > {path}; fi" for path, value in values)
    command(["ip", "netns", "exec", netns, "sh", "-ec", f"cd /proc/sys/net; {writes}"])


def start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot, None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command's name, in parentheses, may hold spaces
    return None if fields[0] in "ZX" else int(fields[19])


def owner_prefix(network: int) -> str:
    """The start of the names of this process's ``network``-th network."""
    pid = os.getpid()
    return f"tw{pid}-{start_ticks(pid) or 0:x}-{network}-"


def existing(prefix: str = "tw") -> list[str]:
    """Names of thinwire's namespaces that start with ``prefix``, sorted."""
    if not _FOLDER.is_dir():
        return []
    return sorted(p.name for p in _FOLDER.iterdir() if p.name.startswith(prefix) and _NAME.fullmatch(p.name))


def leftovers() -> list[str]:
    """Names of namespaces whose owner no longer lives."""
    dead = []
    for name in existing():
        match = _NAME.fullmatch(name)
        if match is not None and start_ticks(int(match[1])) != int(match[2], 16):
            dead.append(name)
    return dead


def remove(names: Iterable[str]) -> None:
    """Remove namespaces; one that is gone already (another sweeper was faster) is no error."""
    for name in names:
        try:
            command(["ip", "netns", "del", name])
        except NetworkError:
            if (_FOLDER / name).exists():
                raise


def sweep() -> list[str]:
    """Remove the namespaces of dead owners and return their names."""
    dead = leftovers()
    remove(dead)
    return dead
