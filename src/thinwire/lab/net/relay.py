"""Hold frames for a fixed time between two TAP devices, run as a script. Imports the standard library only.

``relay.py NETNS DEVICE SWITCH PORT LATENCY_S`` makes DEVICE in namespace NETNS and PORT in namespace SWITCH,
prints "ready", and forwards: from DEVICE to PORT after LATENCY_S, back at once. Ends when its input does.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

_CLONE_NEWNET = 0x40000000
_PR_SET_TIMERSLACK = 29
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02  # checksums and TCP/IPv4 segments: several segments pass as one frame
_FRAME_BYTES = 1 << 17
_HELD_BYTES = 64 << 20  # more than any window: beyond it frames are dropped, as in a full queue
_BATCH = 64


def _tap(netns: str, name: str) -> int:
    fd = os.open(f"/var/run/netns/{netns}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter namespace {netns}")
    os.close(fd)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _OFFLOADS)
    return tap


def _frames(tap: int) -> list[bytes]:
    frames: list[bytes] = []
    with contextlib.suppress(OSError):  # no more for now, or the device is down
        while len(frames) < _BATCH:
            frames.append(os.read(tap, _FRAME_BYTES))
    return frames


def _write(tap: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # a device that is down loses the frame, as a cut cable does
        os.write(tap, frame)


def main(netns: str, device: str, switch: str, port: str, latency: str) -> None:
    host, bridge, owner = _tap(netns, device), _tap(switch, port), sys.stdin.fileno()
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # 1 us instead of 50
    with contextlib.suppress(
        OSError
    ):  # before the ranks: a relay that waits for a core is latency unasked for
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    latency_s = float(latency)
    held: collections.deque[tuple[float, bytes]] = collections.deque()
    held_bytes = 0
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready = select.select((host, bridge, owner), (), (), wait_s)[0]
        if owner in ready and not os.read(owner, 1):
            return
        if host in ready:
            frames = _frames(host)
            release = time.monotonic() + latency_s
            for frame in frames:
                if held_bytes + len(frame) <= _HELD_BYTES:
                    held.append((release, frame))
                    held_bytes += len(frame)
        if bridge in ready:
            for frame in _frames(bridge):
                _write(host, frame)
        now = time.monotonic()
        while held and held[0][0] <= now:
            frame = held.popleft()[1]
            held_bytes -= len(frame)
            _write(bridge, frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
