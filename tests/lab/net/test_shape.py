from __future__ import annotations

import pytest

from thinwire.lab.net.calibration import CHECKED_FROM_BYTES, TOLERANCE
from thinwire.lab.net.shape import FRAME_BYTES, MAX_BURST_BYTES, burst_bytes, qdisc_lines


@pytest.mark.parametrize("bit_s", [10**5, 10**7, 2 * 10**8, 10**9, 10**11])
def test_a_burst_holds_a_frame_and_at_most_16_kib(bit_s: int) -> None:
    assert FRAME_BYTES < burst_bytes(bit_s) <= MAX_BURST_BYTES


def test_no_free_ride_on_a_checked_size_up_to_300_mbit() -> None:
    assert burst_bytes(300_000_000) <= TOLERANCE * CHECKED_FROM_BYTES


def test_every_device_is_counted_and_netem_holds_before_the_bucket() -> None:
    assert len(qdisc_lines("x", None)) == 1
    assert "tbf rate 1000000bit" in qdisc_lines("x", 10**6)[0]
    netem, bucket = qdisc_lines("x", 10**6, 0.001)
    assert "root handle 1: netem delay 1000us" in netem
    assert "parent 1:1 handle 10: tbf" in bucket
