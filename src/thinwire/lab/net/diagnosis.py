"""Find out, by trying, what this machine can emulate, and say what is missing and how to get it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...errors import NetworkError
from . import namespace
from .endings import ending_signals_raise

_number = itertools.count()


@dataclass(frozen=True)
class Finding:
    """One thing that was tried. needed: whether netlab cannot work without it. fix: what to do, "" if ok."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = True

    def __str__(self) -> str:
        word = "ok" if self.ok else "missing" if self.needed else "absent"
        return f"{self.name}: {word}, {self.detail}" + (f"; {self.fix}" if self.fix else "")


def doctor() -> list[Finding]:
    """Try everything that netlab uses, in a namespace that is removed again. One finding each."""
    findings = [
        _finding(
            "root", os.geteuid() == 0, f"user id {os.geteuid()}", "run as root, or use the paced transport"
        ),
        *(
            _finding(tool, bool(path), path or "not found", "install iproute2")
            for tool in ("ip", "tc")
            for path in (shutil.which(tool),)
        ),
    ]
    if all(finding.ok for finding in findings):
        findings += _tried()
    findings.append(_leftovers())
    findings.append(_machine())
    return findings


def available() -> str | None:
    """Why netlab cannot be used here, None when it can."""
    bad = [str(finding) for finding in doctor() if finding.needed and not finding.ok]
    return "; ".join(bad) or None


def _finding(name: str, ok: bool, detail: str, fix: str, needed: bool = True) -> Finding:
    return Finding(name, ok, detail, "" if ok else fix, needed)


def _tried() -> list[Finding]:
    try:
        with ending_signals_raise(), _scratch() as name:
            findings = [Finding("network namespaces", True, "made one and removed it")]
            for what, tool, line, fix, needed in _TRIALS:
                findings.append(_try(what, partial(namespace.batch, tool, [line], name), fix, needed))
            findings.append(_try("/dev/net/tun", partial(_make_tap, name), *_TUN_FIX))
            return findings
    except NetworkError as e:
        return [Finding("network namespaces", False, str(e), "needs CAP_SYS_ADMIN and CONFIG_NET_NS")]


_LATENCY_FIX = "only added latency needs it: netem, or else /dev/net/tun"
_TUN_FIX = (f"{_LATENCY_FIX} (CONFIG_TUN, the device node in the container)", False)
_TRIALS = (
    ("veth", "ip", "link add name a type veth peer name b", "needs CONFIG_VETH", True),
    ("bridge", "ip", "link add c type bridge", "needs CONFIG_BRIDGE", True),
    (
        "tbf",
        "tc",
        "qdisc add dev a root tbf rate 1mbit burst 4096 limit 65536",
        "needs CONFIG_NET_SCH_TBF",
        True,
    ),
    ("netem", "tc", "qdisc add dev b root netem delay 1ms", f"{_LATENCY_FIX} (CONFIG_NET_SCH_NETEM)", False),
)


@contextmanager
def _scratch() -> Iterator[str]:
    name = f"{namespace.owner_prefix(next(_number))}doctor"
    namespace.command(["ip", "netns", "add", name])
    try:
        yield name
    finally:
        namespace.remove([name])


def _try(what: str, action: Callable[[], object], fix: str, needed: bool) -> Finding:
    try:
        action()
    except NetworkError as e:
        return Finding(what, False, str(e).rpartition("(")[2].rstrip(")").splitlines()[0], fix, needed)
    return Finding(what, True, "tried", "", needed)


def _make_tap(netns: str) -> None:
    if not Path("/dev/net/tun").exists():
        raise NetworkError("no device node")
    namespace.batch("ip", ["tuntap add dev t mode tap"], netns)


def _leftovers() -> Finding:
    names = namespace.leftovers()
    detail = f"of dead owners: {', '.join(names)}" if names else "none"
    return _finding("leftover namespaces", not names, detail, "the next Network removes them", needed=False)


def _machine() -> Finding:
    cores = len(os.sched_getaffinity(0))
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    detail = f"{cores} core(s), {gib:.1f} GiB of memory"
    fix = "eight ranks want 2 cores and 8 GiB: use fewer ranks"
    return _finding("machine", cores >= 2 and gib >= 7.5, detail, fix, needed=False)
