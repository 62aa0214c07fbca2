"""Where ranks run."""

import pytest

from thinwire.errors import LayoutError, SpecError
from thinwire.lab.cluster import cluster, interface_tx_bytes, spread


def test_ranks_are_spread_evenly_neighbours_together() -> None:
    assert spread(8, 4) == (2, 2, 2, 2)
    assert spread(7, 3) == (3, 2, 2)
    assert spread(3, 1) == (3,)


@pytest.mark.parametrize("hosts", [0, 5])
def test_more_hosts_than_ranks_is_an_error(hosts: int) -> None:
    with pytest.raises(LayoutError, match=f"4 ranks cannot be put on {hosts} hosts"):
        spread(4, hosts)


def test_without_a_link_nothing_is_emulated_and_the_result_says_so() -> None:
    with cluster(4, 2, "none") as places:
        assert places.link()["emulation"] == "none"
        assert places.places is None
        assert "no network was emulated" in places.note


def test_paced_senders_are_named_in_the_result() -> None:
    with cluster(4, 2, "100mbit", paced=True) as places:
        link = places.link()
    assert link["emulation"] == "paced"
    assert "paced" in link["note"]
    assert link["rate_bit_s"] == 100_000_000


def test_a_rate_that_does_not_parse_is_an_error() -> None:
    with pytest.raises(SpecError), cluster(4, 2, "fast"):
        pass


def test_interface_counter() -> None:
    assert interface_tx_bytes("lo") is not None
    assert interface_tx_bytes("no-such-interface") is None
