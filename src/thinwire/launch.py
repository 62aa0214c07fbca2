"""Start rank processes, watch them, and say which one failed and why.

Ranks are forked from a server process that has already imported torch and thinwire, so that starting eight
of them takes a fraction of a second instead of eight imports. Before a rank opens a socket it may enter a
network namespace (``netns``), which puts it on a host of an emulated network.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from .errors import NetworkError, RankError

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Place:
    """Where a rank runs: a network namespace (None: the caller's), the interface gloo binds to, and its host's address."""

    netns: str | None = None
    interface: str = "lo"
    address: str = ""


class Reporter:
    """A rank's line to its launcher: ``reporter(x)`` calls the launcher's ``on_message(rank, x)``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, message: Any) -> None:
        send(self._connection, "message", message)


def send(connection: Connection, kind: str, body: Any) -> None:
    """Tell the launcher something: a ``message``, the ``result``, or an ``error`` (in words, and its traceback)."""
    # Plain pickling copies tensors; torch's own would hand over memory that ends with the rank.
    connection.send_bytes(pickle.dumps((kind, body)))


def enter_netns(name: str) -> None:
    """Move the calling process into the network namespace ``name`` (needs root)."""
    fd = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            raise NetworkError(f"cannot enter namespace {name}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world: int,
    args: tuple[Any, ...],
    place: Place,
    store_path: str,
    timeout_s: float,
    parent: int,
    connection: Connection,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    _die_with(parent)
    try:
        if place.netns is not None:
            enter_netns(place.netns)
        os.environ["GLOO_SOCKET_IFNAME"] = place.interface
        torch.set_num_threads(1)
        store = FileStore(store_path, world)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        # A rank that closes the group at once would break connections that others still make.
        store.set(f"ready/{rank}", "")
        store.wait([f"ready/{r}" for r in range(world)], timedelta(seconds=timeout_s))
        result = fn(rank, world, *args, Reporter(connection))
        dist.destroy_process_group()
        send(connection, "result", result)
    except BaseException as e:
        with suppress(Exception):
            send(connection, "error", (f"{type(e).__name__}: {e}", traceback.format_exc()))
        os._exit(1)
    # Worker threads of a group that was not destroyed must not keep a finished rank alive.
    connection.close()
    os._exit(0)


def _die_with(parent: int) -> None:
    """End this rank when the launcher ends, however it ends (kill -9 included)."""
    import threading

    def watch() -> None:
        while True:
            time.sleep(1.0)
            try:
                os.kill(parent, 0)
            except OSError:
                os._exit(3)

    threading.Thread(target=watch, daemon=True, name="thinwire-launcher-watch").start()


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60.0,
    collective_timeout: float | None = None,
    grace: float = 2.0,
    places: Sequence[Place] | None = None,
    on_message: Callable[[int, Any], None] | None = None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Run ``fn(rank, world, *args, report)`` in ``world`` processes and return their results in rank order.

    fn: a module-level function. The default process group is gloo, made before fn and destroyed after it.
    ``report(x)`` sends x to ``on_message(rank, x)`` in this process. timeout: seconds for the whole run;
    collective_timeout: seconds for one collective (default: timeout). grace: seconds in which the other ranks may end by
    themselves after one has failed. places: one per rank. preload: modules
    that the fork server imports before the first rank starts.

    Raises RankError as soon as a rank fails, dies or the time is up: it names the rank and shows its
    traceback. All rank processes have ended when this returns or raises.
    """
    if places is not None and len(places) != world:
        raise ValueError(f"{len(places)} places for {world} ranks")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["thinwire.launch", *preload])
    folder = tempfile.mkdtemp(prefix="thinwire-")
    ranks: list[BaseProcess] = []
    lines: list[Connection] = []
    try:
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            place = places[rank] if places is not None else Place()
            process: BaseProcess = context.Process(
                target=_rank_main,
                args=(
                    fn, rank, world, args, place, os.path.join(folder, "store"),
                    collective_timeout or timeout, os.getpid(), sender,
                ),
                name=f"thinwire-rank-{rank}",
                daemon=True,
            )  # fmt: skip
            process.start()
            sender.close()
            ranks.append(process)
            lines.append(receiver)
        return _collect(ranks, lines, timeout, grace, on_message)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
        for process in ranks:
            process.join()
        for line in lines:
            line.close()
        shutil.rmtree(folder, ignore_errors=True)


def _collect(
    ranks: list[BaseProcess],
    lines: list[Connection],
    timeout: float,
    grace: float,
    on_message: Callable[[int, Any], None] | None,
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[int, str, str]] = []
    open_lines = {line: rank for rank, line in enumerate(lines)}
    deadline = time.monotonic() + timeout
    while open_lines:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        for ready in wait(list(open_lines), timeout=min(remaining, 1.0)):
            assert isinstance(ready, Connection)
            rank = open_lines[ready]
            try:
                kind, body = pickle.loads(ready.recv_bytes())
            except EOFError:
                del open_lines[ready]
                if rank not in results and not any(f[0] == rank for f in failures):
                    ranks[rank].join()
                    failures.append((rank, f"ended with exit code {ranks[rank].exitcode}", ""))
                    deadline = min(deadline, time.monotonic() + grace)
                continue
            if kind == "message":
                if on_message is not None:
                    on_message(rank, body)
            elif kind == "result":
                results[rank] = body
            else:
                failures.append((rank, *body))
                deadline = min(deadline, time.monotonic() + grace)
    if failures:
        raise failure(failures, len(ranks))
    if len(results) < len(ranks):
        late = sorted(set(range(len(ranks))) - set(results))
        raise RankError(
            f"no answer from rank(s) {late} within {timeout:g} s; all ranks were stopped", late[0]
        )
    return [results[rank] for rank in range(len(ranks))]


def failure(failures: Sequence[tuple[int, str, str]], world: int) -> RankError:
    """What to raise for ranks that have failed: (rank, in words, traceback) of each, the first one first."""
    # A rank that was killed leaves no traceback and is the cause; the others only lost their peer.
    rank, message, text = min(failures, key=lambda f: bool(f[2]))
    others = sorted({f[0] for f in failures} - {rank})
    tail = f"\nrank(s) {others} stopped after it" if others else ""
    detail = f"\n{text.rstrip()}" if text else ""
    return RankError(f"rank {rank} of {world} failed: {message}{tail}{detail}", rank, text)
