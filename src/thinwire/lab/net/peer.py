"""The two ends of a calibration, run as a script inside two hosts. Imports the standard library only.

``peer.py serve ADDRESS`` prints its port and answers one client. ``peer.py measure ADDRESS PORT`` reads lines
``[nbytes, repeats, both]`` of JSON from its input and prints for each a list of seconds.

A transfer is a header of 9 bytes, nbytes of payload one way (``both``: each way at once), and one byte back
when the last byte has arrived.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import sys
import time

_HEADER = struct.Struct("!Q?")
_TIMEOUT_S = 30.0
_IDLE_S = 0.003  # between transfers: the token buckets fill, so that a free ride on them would show
_CHUNK = 1 << 18


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        got = sock.recv(nbytes - len(data))
        if not got:
            raise ConnectionError(f"the peer closed with {nbytes - len(data)} of {nbytes} bytes missing")
        data += got
    return data


def _exchange(sock: socket.socket, outgoing: bytes, incoming: int) -> None:
    """Send ``outgoing`` and receive ``incoming`` bytes at the same time."""
    buffer = bytearray(_CHUNK)
    unsent = memoryview(outgoing)
    while incoming or unsent:
        readable, writable, _ = select.select(
            [sock] if incoming else [], [sock] if unsent else [], [], _TIMEOUT_S
        )
        if not readable and not writable:
            raise TimeoutError(f"{len(unsent)} bytes not sent and {incoming} not received")
        if readable:
            got = sock.recv_into(buffer, min(incoming, _CHUNK))
            if got == 0:
                raise ConnectionError(f"the peer closed with {incoming} bytes missing")
            incoming -= got
        if writable:
            with contextlib.suppress(BlockingIOError):
                unsent = unsent[sock.send(unsent, socket.MSG_DONTWAIT) :]


def _serve(address: str) -> None:
    with socket.create_server((address, 0)) as listener:
        listener.settimeout(_TIMEOUT_S)
        print(listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(_TIMEOUT_S)
            while True:
                nbytes, both = _HEADER.unpack(_receive(sock, _HEADER.size))
                if nbytes == 0:
                    return
                _exchange(sock, bytes(nbytes) if both else b"", nbytes)
                sock.sendall(b"!")


def _transfer(sock: socket.socket, payload: bytes, both: bool) -> float:
    message = _HEADER.pack(len(payload), both) + payload
    begin = time.perf_counter()
    _exchange(sock, message, len(payload) if both else 0)
    _receive(sock, 1)
    return time.perf_counter() - begin


def _measure(address: str, port: int) -> None:
    with socket.create_connection((address, port), timeout=_TIMEOUT_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for line in sys.stdin:
            nbytes, repeats, both = json.loads(line)
            payload = bytes(nbytes)
            seconds = []
            for _ in range(repeats):
                time.sleep(_IDLE_S)
                seconds.append(_transfer(sock, payload, both))
            print(json.dumps(seconds), flush=True)
        sock.sendall(_HEADER.pack(0, False))


if __name__ == "__main__":
    with contextlib.suppress(
        OSError
    ):  # before other programs: the link is measured, not the load of the machine
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    if sys.argv[1] == "serve":
        _serve(sys.argv[2])
    else:
        _measure(sys.argv[2], int(sys.argv[3]))
