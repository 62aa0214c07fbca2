"""Puts ``tests/`` on the path, so that ranks and test modules share ``support``; compiles the kernels once."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def kernels() -> None:
    """Ranks load compiled kernels from the cache instead of compiling them side by side."""
    from thinwire.codecs import warm_up

    warm_up()
