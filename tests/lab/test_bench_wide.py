"""Many ranks on one machine: all collectives, the codecs of the presets; a rank's costs grow no faster than the world."""

from __future__ import annotations

import pytest

from thinwire.lab.bench.wide import preset_codecs, run_wide

pytestmark = pytest.mark.usefixtures("kernels")
NUMEL = 1 << 14


def test_presets_name_these() -> None:
    names = {codec.partition(":")[0] for codec in preset_codecs()}
    assert {"none", "bf16", "int4", "exponent", "mpc", "zfp"} <= names


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sixty_four_ranks() -> None:
    codecs = preset_codecs()
    few, many = (run_wide(ranks, NUMEL, codecs) for ranks in (8, 64))
    assert few.differ == many.differ == []
    for name, error in many.errors.items():
        # Hierarchical has one level more here than with 8 ranks, which share one host.
        grows = name.endswith("ring") or (name.endswith("hierarchical") and few.errors[name] < 1e-6)
        if not grows:
            assert error <= 1.25 * few.errors[name] + 1e-6, name
        if "hierarchical" in name:
            assert error <= 1.25 * many.errors[name.replace("hierarchical", "two_shot")] + 1e-6, name
    assert many.after.threads <= few.after.threads + 2
    assert many.after.sockets <= 8 * few.after.sockets
    assert many.after.memory_mib - many.before.memory_mib < 64
