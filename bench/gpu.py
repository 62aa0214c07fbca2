"""Codecs on a CUDA device: the bytes of the CPU, and how fast; the order of a worker's stream. Under eight minutes.

    python bench/gpu.py --out results/DATE_gpu

Needs a CUDA device, torch >= 2.11 and Triton >= 3.6. First every codec that has GPU kernels codes messages of all kinds on
both devices: payloads, decoded values, sums and residuals must have the same bits. Then encode, decode and decode_add are
timed beside ``copy_`` of the same tensor. A worker's calls must see what the caller's stream wrote before them, and who
waits for them must see what they wrote. Writes OUT/result.json; prints a table last. Exit status 1 if a bit differs or comes
too early.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec, parse
from thinwire.collectives.work import Worker
from thinwire.lab.bench.record import command_line, environment, write_json
from thinwire.testing import same_bits

SPECS = (
    "none", "bf16", "fp16", "int8", "int8:block=32", "int8:round=stochastic", "int6", "int5", "int4", "int4:block=96",
    "int4:round=stochastic", "int3", "int2", "zfp:rate=8", "zfp:rate=12", "zfp:rate=16", "zfp:rate=24", "mpc:dim=1",
    "mpc:dim=3", "exponent",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1 << 20, 16 << 20, 256 << 20)
"""Bytes of the timed tensors."""
REPEATS, SEED = 15, 0x1234_5678_9ABC_DEF0


def messages(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What the kernels have to get right: sizes, magnitudes, subnormals, zeros, ties, the largest values, NaN and Inf."""
    rng = torch.Generator().manual_seed(0)
    largest = torch.finfo(dtype).max
    for n in (0, 1, 31, 127, 128, 129, 1000, 100_003):
        yield f"{n} normal values", torch.randn(n, generator=rng).to(dtype)
    exponents = torch.randint(-45, 38, (65_536,), generator=rng).double()
    mixed = torch.randn(65_536, generator=rng, dtype=torch.float64) * 10.0**exponents
    yield "mixed magnitudes", mixed.clamp(-largest, largest).to(dtype)
    yield "halves, which tie", (torch.randint(-256, 256, (65_536,), generator=rng) / 2).to(dtype)
    yield "zeros", torch.zeros(1000, dtype=dtype)
    size = torch.int16 if dtype.itemsize == 2 else torch.int32
    high = 1 << (8 * dtype.itemsize - 1)
    bits = torch.randint(-high, high, (262_144,), generator=rng)
    yield "any bits", bits.to(size).view(dtype)


def differences(codec: Codec, x: Tensor) -> list[str]:
    """Which results of a codec on the GPU differ from the CPU's."""
    wrong = []
    limit = codec.max_nbytes(x.numel(), x.dtype)
    payload, y, total = (
        torch.empty(limit, dtype=torch.uint8),
        torch.empty_like(x),
        torch.linspace(-1, 1, x.numel()),
    )
    payload = payload[: codec.encode(x, payload, seed=SEED)]
    codec.decode(payload, y)
    codec.decode_add(payload, total, x.dtype)
    there = x.cuda()
    found, back = torch.empty(limit, dtype=torch.uint8, device="cuda"), torch.empty_like(there)
    sums = torch.linspace(-1, 1, x.numel()).cuda()
    size = codec.encode(there, found, seed=SEED)
    if not torch.equal(found[:size].cpu(), payload):
        wrong.append("payload")
    codec.decode(payload.cuda(), back)
    if not same_bits(back.cpu(), y):
        wrong.append("values")
    codec.decode_add(payload.cuda(), sums, x.dtype)
    # Which NaN a sum has is up to the hardware.
    if not same_bits(sums.cpu().nan_to_num(7), total.nan_to_num(7)):
        wrong.append("sums")
    if x.dtype == torch.float32:
        here, lost = x.clone(), there.clone()
        codec.encode_residual(here, torch.empty(limit, dtype=torch.uint8), here, seed=SEED)
        codec.encode_residual(lost, found, lost, seed=SEED)
        if not same_bits(lost.cpu().nan_to_num(7), here.nan_to_num(7)):
            wrong.append("residual")
    return wrong


def out_of_order(rounds: int = 50) -> list[str]:
    """Which of a worker's calls came too early or too late, among long kernels of the caller's stream."""
    worker, wrong = Worker("bench"), []
    busy = torch.randn(4096, 4096, device="cuda")
    for i in range(rounds):
        x = torch.zeros(1 << 22, device="cuda")
        y = torch.zeros_like(x)
        busy @ busy  # what the worker must wait for is still to come
        x.add_(i)
        work = worker.submit(partial(_slow_copy, y, x, busy), y)
        del x  # its memory must not be used again before the worker has read it
        torch.full((1 << 22,), -1.0, device="cuda")
        work.wait()
        if not bool((y == i).all()):
            wrong.append(f"call {i} of a worker")
    worker.close()
    return wrong


def _slow_copy(y: Tensor, x: Tensor, busy: Tensor) -> None:
    busy @ busy  # whoever waits must wait for this, too
    y.copy_(x)


def seconds(call: Callable[[], object]) -> float:
    """Median time of a call on the device, after two untimed ones."""
    times: list[float] = []
    for repeat in range(REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        if repeat >= 2:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure(codec: Codec, dtype: torch.dtype, nbytes: int) -> dict[str, Any]:
    """GB/s of the tensor's bytes for each operation, and for a copy."""
    x = torch.randn(nbytes // dtype.itemsize, device="cuda").to(dtype)
    room = torch.empty(codec.max_nbytes(x.numel(), dtype), dtype=torch.uint8, device="cuda")
    payload = room[: codec.encode(x, room)].clone()
    y, total = torch.empty_like(x), torch.zeros(x.numel(), device="cuda")
    calls = {
        "encode": lambda: codec.encode(x, room),
        "decode": lambda: codec.decode(payload, y),
        "decode_add": lambda: codec.decode_add(payload, total, dtype),
        "copy": lambda: y.copy_(x),
    }
    speeds = {name: nbytes / seconds(call) / 1e9 for name, call in calls.items()}
    return {"spec": str(codec), "dtype": str(dtype).removeprefix("torch."), "nbytes": nbytes, "gb_s": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    if not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py needs a CUDA device; torch sees none")
    wrong = out_of_order()
    for spec in SPECS:
        codec = parse(spec)
        for dtype in DTYPES:
            for label, x in messages(dtype):
                wrong += [f"{codec}, {dtype}, {label}: {what}" for what in differences(codec, x)]
    rows = [measure(parse(spec), dtype, n) for spec in SPECS for dtype in DTYPES[:2] for n in SIZES]
    out.mkdir(parents=True, exist_ok=True)
    import triton

    record = {
        "environment": {**environment(), "gpu": torch.cuda.get_device_name(), "triton": triton.__version__},
        "command": command_line(),
        "repeats": REPEATS,
        "differences": wrong,
        "rows": rows,
    }
    write_json(out / "result.json", record)
    print(f"{'codec':<34}{'dtype':<10}{'MiB':>5}{'encode':>9}{'decode':>9}{'+add':>9}{'copy':>9}   GB/s")
    for row in rows:
        speeds = "".join(f"{row['gb_s'][name]:>9.1f}" for name in ("encode", "decode", "decode_add", "copy"))
        print(f"{row['spec']:<34}{row['dtype']:<10}{row['nbytes'] >> 20:>5}{speeds}")
    if wrong:
        raise SystemExit("bits differ between the devices, or come out of order:\n" + "\n".join(wrong))
    print("all bits are those of the CPU; a worker's stream keeps the order")


if __name__ == "__main__":
    main()
