"""Puts ``tests/`` on the path, so that ranks and test modules share ``support``; compiles the kernels once.

Tests that start processes are marked: two sets of ranks at a time would only wait for each other.

Triton's kernels run in its interpreter, which it decides when it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")


_STARTS_PROCESSES = ("run_ranks", "run_mpi_ranks", "run_curves", "subprocess", "cluster(")


@pytest.hookimpl(tryfirst=True)  # before marks are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    starts: dict[Path, bool] = {}
    for item in items:
        if item.path not in starts:
            text = item.path.read_text()
            starts[item.path] = any(word in text for word in _STARTS_PROCESSES)
        if starts[item.path]:
            item.add_marker(pytest.mark.ranks)


@pytest.fixture(scope="session")
def kernels() -> None:
    """Ranks load compiled kernels from the cache instead of compiling them side by side."""
    from thinwire.codecs import warm_up

    warm_up()


@pytest.fixture(scope="session")
def netlab_reason() -> str | None:
    """Why networks cannot be emulated here; None: they can."""
    from thinwire.lab.net import available

    return available()


@pytest.fixture
def netlab(netlab_reason: str | None) -> Iterator[None]:
    """Skip where netlab cannot be used; afterwards this process has no namespace left."""
    from thinwire.lab.net.namespace import existing

    if netlab_reason is not None:
        pytest.skip(f"netlab cannot be used: {netlab_reason}")
    yield
    assert existing(f"tw{os.getpid()}-") == []
