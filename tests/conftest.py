"""Puts ``tests/`` on the path, so that ranks and test modules share ``support``; compiles the kernels once.

Triton's kernels run in its interpreter, which it decides when it is imported.
"""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def kernels() -> None:
    """Ranks load compiled kernels from the cache instead of compiling them side by side."""
    from thinwire.codecs import warm_up

    warm_up()
