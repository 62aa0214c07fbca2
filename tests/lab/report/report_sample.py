"""A synthetic but complete result, the same at every call: values are made up, relations are as in a real one."""

from __future__ import annotations

import math
import random
from typing import Any

# name: (wire bytes per raw byte on dp, tp, pp, zero; ms of encode + decode; loss penalty in nats; description)
POLICIES: dict[str, tuple[tuple[float, float, float, float], float, float, str]] = {
    "none": ((1, 1, 1, 1), 0, 0, "uncompressed fp32"),
    "bf16": ((0.5, 0.5, 0.5, 0.5), 6, 0.0002, "every message cast to bf16"),
    "naive-mpc": ((0.92, 0.9, 0.9, 0.93), 40, 0, "the paper's naive lossless scheme: MPC on everything"),
    "naive-zfp:8": (
        (0.25, 0.25, 0.25, 0.25),
        45,
        0.06,
        "the paper's naive lossy scheme: ZFP rate 8 on everything",
    ),
    "mzhybrid": ((0.25, 0.9, 0.9, 0.93), 42, 0.004, "MPC for tp, pp and zero, ZFP rate 8 for dp"),
    "zhybrid": ((0.25, 0.5, 0.5, 0.5), 45, 0.008, "ZFP rate 16 for tp, pp and zero, rate 8 for dp"),
    "lossless": ((0.83, 0.83, 0.83, 0.7), 30, 0, "exponent coding on everything"),
    "balanced": ((0.14, 0.27, 0.27, 0.14), 20, 0.0004, "int4 with residual on dp, int8 on tp and pp"),
    "aggressive": ((0.05, 0.14, 0.14, 0.07), 25, 0.03, "top-k on dp, int4 elsewhere"),
    "auto": ((0.14, 0.27, 0.5, 0.14), 18, 0.0005, "what the planner chose for this link"),
}
_RAW = {"dp": 3.2e6, "tp": 6.3e6, "pp": 2.1e6, "zero": 1.6e6}
_MESSAGES = [
    ("tp", "all_reduce", "activation", 48, 0.5),
    ("tp", "all_reduce", "activation_gradient", 48, 0.5),
    ("dp", "reduce_scatter", "gradient", 2, 1.0),
    ("zero", "all_gather", "parameter", 2, 1.0),
    ("pp", "send", "activation", 4, 0.5),
    ("pp", "send", "activation_gradient", 4, 0.5),
]


def make_run(policy: str, seed: int, steps: int = 300) -> dict[str, Any]:
    shares, codec_ms, penalty, description = POLICIES[policy]
    rng = random.Random(f"{policy}/{seed}")
    wire = {a: _RAW[a] * s for a, s in zip(("dp", "tp", "pp", "zero"), shares, strict=True)}
    wire_ms = sum(wire.values()) * 8 * 2 / 2e8 * 1e3  # two ranks share a host's link
    zero = 205 + rng.uniform(-2, 2)
    step = zero + 0.85 * wire_ms + codec_ms * 0.6 + rng.uniform(-6, 6)
    data = random.Random(seed)  # the same data for every policy of a seed
    offset = data.uniform(-0.03, 0.03)

    def loss(i: int) -> float:
        fade = 1 - math.exp(-i / 60)
        return 3.1 + offset + 2.5 * math.exp(-i / 55) + 0.8 * math.exp(-i / 400) + fade * penalty

    noise = [data.gauss(0, 0.04) for _ in range(steps)]
    own = 0.0006 if penalty else 0.0
    train = [loss(i) + noise[i] + rng.gauss(0, own * 3) for i in range(steps)]
    curve = [[i, loss(i) + rng.gauss(0, own)] for i in range(0, steps + 1, max(1, steps // 20))]
    return {
        "policy": policy, "description": description, "seed": seed, "steps": steps,
        "samples_per_s": 16e3 / step, "tflops_per_rank": 0.9 / step, "step_ms_median": step,
        "step_ms": [step + rng.uniform(-9, 9) for _ in range(steps)],
        "zero_comm_step_ms": zero, "comm_share": 1 - zero / step, "raw_bytes": dict(_RAW), "wire_bytes": wire,
        "breakdown_ms": {
            "compute": 150.0, "encode": codec_ms * 0.6, "wire": wire_ms * 0.9, "decode": codec_ms * 0.4,
            "wait": step - 150.0 - 8,
        },
        "train_loss": train, "val_loss": curve[-1][1], "val_curve": curve,
        "messages": [
            {
                "axis": axis, "op": op, "role": role, "dtype": "float32", "codec": "none", "count": count,
                "nbytes": _RAW[axis] * share, "seconds": _RAW[axis] * share * 16 / 2e8,
                "wire_nbytes": _RAW[axis] * share + 40 * count,
            }
            for axis, op, role, count, share in _MESSAGES
        ] if policy == "none" else [],
        "interface_bytes": sum(wire.values()) * 2 * 1.045,
    }  # fmt: skip


def make_result(runs: list[dict[str, Any]], emulation: str = "netns") -> dict[str, Any]:
    sizes = [1 << k for k in range(12, 25, 2)]
    seconds = [s * 8 / 1.93e8 + 1.2e-4 for s in sizes]
    return {
        "version": 1,
        "environment": {
            "date": "2026-01-02T03:04:05+00:00", "python": "3.12.1", "torch": "2.13.0", "numba": "0.61.0",
            "numpy": "2.1.0", "cpu": "Example CPU @ 2.0 GHz", "cores": 2, "memory_bytes": 16 << 30,
            "os": "Linux 6.1", "git_commit": "0123456789abcdef0123456789abcdef01234567", "git_dirty": False,
        },
        "command": "thinwire compare --policies none,bf16,balanced --link 200mbit --seeds 5 --out 'a <b> & c'",
        "layout": {"dp": 2, "tp": 2, "pp": 2, "zero": 1}, "hosts": 4, "ranks": 8,
        "link": {
            "spec": "200mbit", "rate_bit_s": 2e8, "latency_s": 0.0, "emulation": emulation,
            "note": "tbf, burst 16 KiB, both directions",
        },
        "calibration": [
            {"nbytes": n, "seconds": t, "goodput_bit_s": n * 8 / t} for n, t in zip(sizes, seconds, strict=True)
        ],
        "model": {
            "preset": "lab", "parameters": 3_200_000, "layers": 4, "hidden": 256, "heads": 4, "sequence": 128,
            "vocabulary": 512, "batch": 16, "micro_batches": 4, "precision": "fp32",
        },
        "runs": runs,
        "parity": [],
    }  # fmt: skip


def crowded() -> dict[str, Any]:
    """Ten policies with one seed, three of them with five."""
    pairs = [(p, 0) for p in POLICIES] + [(p, s) for s in range(1, 5) for p in ("none", "bf16", "balanced")]
    return make_result([make_run(policy, seed) for policy, seed in pairs])


def five_seeds() -> dict[str, Any]:
    """Three policies with five seeds: the uncompressed one, one at parity, one that is not."""
    return make_result([make_run(p, s) for p in ("none", "bf16", "balanced", "aggressive") for s in range(5)])


def single(policy: str = "balanced") -> dict[str, Any]:
    return make_result([make_run(policy, 0, steps=40)], emulation="none")
