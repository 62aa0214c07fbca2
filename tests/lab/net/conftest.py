"""What the tests of emulated networks share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from thinwire.lab.net import available
from thinwire.lab.net.namespace import existing


@pytest.fixture(scope="session")
def netlab_reason() -> str | None:
    return available()


@pytest.fixture
def netlab(netlab_reason: str | None) -> Iterator[None]:
    """Skip where netlab cannot be used; afterwards this process has no namespace left."""
    if netlab_reason is not None:
        pytest.skip(f"netlab cannot be used: {netlab_reason}")
    yield
    assert existing(f"tw{os.getpid()}-") == []
