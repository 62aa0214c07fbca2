"""Queueing disciplines of one end of a link: token bucket, added latency, and the numbers they need.

The burst decides what is emulated: a token bucket of B bytes lets the first B bytes of every message after a
pause ride free. Here it holds one full frame, so that a bucket can work at all, and what the rate brings
during the time by which the kernel's timer may be late (tokens that do not fit are lost: too small a bucket
falls short of the rate). At 200 mbit that is 4.5 kB, under 7 % of a 64 KiB message.
"""

from __future__ import annotations

import math

FRAME_BYTES = 1514  # full Ethernet frame at the MTU of 1500, without checksum: what tbf counts
SEGMENT_BYTES = 1448  # TCP payload in it: IPv4 header 20, TCP header 20 and time stamps 12
MAX_BURST_BYTES = 16 * 1024
_TIMER_LATE_S = 120e-6
_QUEUE_BYTES = 1 << 20
_UNSHAPED_FRAMES = 10_000
_NETEM_FRAMES = 1_000_000


def burst_bytes(bit_s: int) -> int:
    """Size of the token bucket in bytes: one frame and 120 us at the rate, at most 16 KiB."""
    return min(MAX_BURST_BYTES, FRAME_BYTES + math.ceil(bit_s / 8 * _TIMER_LATE_S))


def qdisc_lines(device: str, bit_s: int | None, netem_latency_s: float = 0.0) -> list[str]:
    """Lines for ``tc -batch`` that shape what leaves by ``device``. bit_s None: not shaped, still counted.

    netem_latency_s: seconds by which the kernel's netem holds each frame before it is shaped; 0: without.
    """
    lines = []
    parent, handle = "root", "1:"
    if netem_latency_s > 0:
        delay_us = math.ceil(netem_latency_s * 1e6)
        lines.append(f"qdisc add dev {device} root handle 1: netem delay {delay_us}us limit {_NETEM_FRAMES}")
        parent, handle = "parent 1:1", "10:"
    if bit_s is not None:
        bucket = f"tbf rate {bit_s}bit burst {burst_bytes(bit_s)} limit {_QUEUE_BYTES}"
        lines.append(f"qdisc add dev {device} {parent} handle {handle} {bucket}")
    elif not lines:
        lines.append(f"qdisc add dev {device} root handle 1: pfifo limit {_UNSHAPED_FRAMES}")
    return lines


def gso_lines(device: str, bit_s: int | None) -> list[str]:
    """Lines for ``ip -batch`` that keep segmentation-offload frames of ``device`` within the token bucket."""
    return [] if bit_s is None else [f"link set dev {device} gso_max_size {burst_bytes(bit_s)}"]
