from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.collectives.frames import Chunks, equal_parts


@given(st.integers(0, 5000), st.integers(1, 17), st.sampled_from([1, 4, 32, 128, 2048]))
def test_chunks_cover_everything_once_and_cut_no_block(numel: int, size: int, granule: int) -> None:
    chunks = Chunks.of(numel, size, granule)
    bounds = [chunks.bounds(owner) for owner in range(size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    assert all(start % granule == 0 for start, stop in bounds if start != stop)
    assert all(stop - start <= chunks.length for start, stop in bounds)
    assert chunks.length < -(-numel // size) + granule, "no longer than the granule asks for"


def test_equal_parts_are_views_also_of_nothing() -> None:
    flat = torch.arange(6)
    parts = equal_parts(flat, 3)
    parts[1].zero_()
    assert flat.tolist() == [0, 1, 0, 0, 4, 5]
    assert [p.numel() for p in equal_parts(torch.empty(0), 4)] == [0] * 4


@pytest.mark.parametrize("size", [1, 3])
def test_a_short_tensor_leaves_the_last_owners_nothing(size: int) -> None:
    chunks = Chunks.of(1, size, 128)
    assert [stop - start for start, stop in map(chunks.bounds, range(size))] == [1] + [0] * (size - 1)
