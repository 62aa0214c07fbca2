"""What is said of captured messages, on messages whose answers are known; and a capture from start to end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from thinwire.lab.bench.messages.capture import CaptureCodec, Role
from thinwire.lab.bench.messages.figures import write_figures
from thinwire.lab.bench.messages.measure import (
    LOSSLESS,
    LOSSY,
    entropy,
    exponent_bound,
    measure_roles,
    measure_spectra,
    order0_bound,
)
from thinwire.lab.commands import command


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_entropy() -> None:
    assert entropy([1, 1, 1, 1]) == 2
    assert entropy([5, 0, 0]) == 0
    assert entropy([1, 3]) == pytest.approx(0.25 * 2 + 0.75 * math.log2(4 / 3))


def test_bounds_on_known_values() -> None:
    """Gaussian bf16: exponents have 2.545 bits, whole values 10.46; a constant has nothing but sign and mantissa."""
    gaussian = normal(1 << 20).bfloat16()
    assert exponent_bound(gaussian) == pytest.approx(1.517, abs=0.002)
    assert order0_bound(gaussian) == pytest.approx(1.529, abs=0.003)
    assert exponent_bound(torch.ones(100)) == pytest.approx(32 / 24)
    assert exponent_bound(torch.ones(100, dtype=torch.float16)) == pytest.approx(16 / 11)
    assert order0_bound(normal(1 << 20)) > 1.15


def test_records_say_what_codecs_do() -> None:
    role = Role("dp", "gradient")
    (record,) = measure_roles({(role, "late"): normal(1 << 16) * 1e-6}, "fp32")
    assert (record.role, record.phase, record.dtype, record.numel) == (
        "dp gradient",
        "late",
        "float32",
        1 << 16,
    )
    assert record.rms == pytest.approx(1e-6, rel=0.02)
    assert record.zeros == 0
    assert len(record.codecs) == len(LOSSLESS) + len(LOSSY)
    exponent, int4 = record.codecs["exponent"], record.codecs["int4"]
    assert exponent.rel_l2 == 0
    assert 0.97 * record.exponent_bound < exponent.ratio <= record.exponent_bound
    assert int4.bits == pytest.approx(4.25)
    assert int4.rel_l2 == pytest.approx(1.12e-2**0.5, rel=0.03)


def test_spectra() -> None:
    low = normal(64, 2) @ normal(2, 48)
    (spectrum,) = measure_spectra({"late": {"w": low}}, "fp32")
    assert spectrum.shape == (64, 48)
    assert spectrum.energy[2] == pytest.approx(1)
    assert spectrum.energy[1] < 1
    assert 1 <= spectrum.stable_rank <= 2
    (zeros,) = measure_spectra({"late": {"w": torch.zeros(4, 4)}}, "fp32")
    assert zeros.energy[1] == zeros.stable_rank == 1


def test_capture_sends_every_bit() -> None:
    codec = CaptureCodec("dp", "gradient")
    x = normal(100)
    out = torch.empty(400, dtype=torch.uint8)
    assert codec.encode(x, out) == 400
    assert torch.equal(out.view(torch.float32), x)


def test_figures(tmp_path: Path) -> None:
    messages = {
        (Role(axis, what), phase): normal(4096)
        for axis, what in (("dp", "gradient"), ("tp", "activation"))
        for phase in ("start", "late")
    }
    spectra = measure_spectra({p: {"w": normal(8, 8)} for p in ("start", "middle", "late")}, "fp32")
    records = [*measure_roles(messages, "fp32"), *measure_roles(messages, "bf16")]
    write_figures(records, spectra, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"ratios.png", "errors.png", "spectra.png"}


@pytest.mark.slow
def test_command_from_start_to_end(tmp_path: Path) -> None:
    arguments = ["bench", "messages", "--model", "tiny", "--steps", "6", "--out", str(tmp_path)]
    run = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert run.exit_code == 0
    result = json.loads((tmp_path / "result.json").read_text())
    found = {(r["precision"], r["role"], r["phase"]) for r in result["records"]}
    roles = (
        "dp gradient", "pp activation", "pp activation_gradient", "state first_moment", "state second_moment",
        "tp activation", "tp activation_gradient", "zero parameter", "zero parameter_difference",
    )  # fmt: skip
    phases = ("start", "middle", "late")
    assert found == {(p, r, f) for p in ("fp32", "bf16") for r in roles for f in phases}
    assert {s["phase"] for s in result["spectra"]} == set(phases)
