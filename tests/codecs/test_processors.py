"""Kernels give the same bytes whatever processor they are compiled for."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of that kind")
@pytest.mark.parametrize(("cpu", "features"), [("x86-64", ""), ("haswell", "+avx2,+fma")])
def test_golden_files(cpu: str, features: str, tmp_path: Path) -> None:
    """By kernels that are compiled for narrower vectors than this machine may have, or for any."""
    of_the_compiler = {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    golden = Path(__file__).with_name("test_golden.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "payload_and_values", str(golden)],
        env={**os.environ, **of_the_compiler},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]
