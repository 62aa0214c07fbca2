"""Write the golden files of the codecs: ``python tests/golden/make.py [SPEC ...]`` (default: those that are missing).

A golden file pins a payload and what it decodes to. They are made once: a payload that changes is a new format,
which needs a new codec name or wire version, so a file that exists is not overwritten unless its spec is given.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import Codec, parse

FOLDER = Path(__file__).parent / "codecs"

SPECS = (
    "none",
    "bf16",
    "fp16",
    "int8",
    "int8:block=32",
    "int8:block=64,round=stochastic",
    "int4",
    "int4:block=32",
    "int4:block=64,round=stochastic",
    "zfp:rate=3",
    "zfp:rate=8",
    "zfp:rate=16",
    "zfp:rate=24",
    "zfp:rate=32",
    "mpc:dim=1",
    "mpc:dim=3",
    "int6",
    "int6:block=96,round=stochastic",
    "int5",
    "int5:block=96,round=stochastic",
    "int3",
    "int3:block=96,round=stochastic",
    "int2",
    "int2:block=96,round=stochastic",
    "exponent",
    "fp8:e4m3",
    "fp8:e5m2,block=32",
    "e3m0",
    "mxfp8:e4m3",
    "mxfp8:e5m2",
    "mxfp4",
    "nvfp4",
    "sign",
    "sign:block=32",
    "topk",
    "topk:k=7,bits=2",
    "bounded:abs=0.01",
    "bounded:rel=0.001",
    "hadamard|int4",
    "hadamard:block=32|int8:block=64",
    "exponent:reuse=2",
    "int8|huffman",
    "int6:block=64,round=stochastic|huffman",
    "hadamard|int4|huffman",
    "zfp:rate=40",
    "zfp:rate=64",
)
"""Every codec, with parameters that take every path. Append; do not change."""

NUMEL = 333
LONGER = {"exponent": 3000, "nvfp4": 1500, "topk": 9000, "bounded": 5000, "coded": 11000}
"""By codec: where a message of NUMEL values does not take every path."""
SEED = 0x1234_5678_9ABC_DEF0


def message(dtype: torch.dtype, numel: int = NUMEL) -> Tensor:
    """Values that every machine makes alike: integer arithmetic and exact scaling, plus special values."""
    k = torch.arange(numel, dtype=torch.int64)
    mantissa = (k * 2654435761 + 12345) % 2**24 - 2**23
    exponent = (k // 37 % 9 - 4) * 3 - 23
    x = torch.ldexp(mantissa.to(torch.float32), exponent.to(torch.int32)).to(dtype)
    x[64:96] = 0.0
    x[96:128] = -0.625
    x[130] = torch.finfo(dtype).max
    x[200] = torch.finfo(dtype).smallest_normal
    x[201] = -0.0
    x[256 + 5] = torch.nan
    x[300] = -torch.inf
    return x


def bits(x: Tensor) -> np.ndarray:
    """The values as unsigned integers of their width."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).numpy()


def name(codec: Codec, dtype: torch.dtype) -> str:
    spec = str(codec).replace("|", "-then-").replace(":", "-").replace("=", "").replace(",", "-")
    return f"{spec}-{str(dtype).removeprefix('torch.')}.npz"


def encode(codec: Codec, x: Tensor) -> Tensor:
    out = torch.empty(codec.max_nbytes(x.numel(), x.dtype), dtype=torch.uint8)
    return out[: codec.encode(x, out, seed=SEED)]


def stream(codec: Codec, x: Tensor) -> list[Tensor]:
    """The payloads of x sent twice with a state."""
    state = codec.new_state()
    out = torch.empty(codec.max_nbytes(x.numel(), x.dtype), dtype=torch.uint8)
    return [out[: codec.encode(x, out, state=state)].clone() for _ in range(2)]


def cases() -> list[tuple[str, torch.dtype]]:
    return [(spec, dtype) for spec in SPECS for dtype in sorted(parse(spec).dtypes, key=str)]


def make(spec: str, dtype: torch.dtype) -> Path:
    """Write the golden file of one codec and dtype: spec, dtype, input and decoded bits, payload, those of a stream."""
    codec = parse(spec)
    x = message(dtype, LONGER.get(codec.name, NUMEL))
    payload = encode(codec, x)
    decoded = torch.empty_like(x)
    codec.decode(payload, decoded)
    path = FOLDER / name(codec, dtype)
    arrays = {"input": bits(x), "payload": payload.numpy(), "decoded": bits(decoded)}
    if codec.stateful:
        arrays |= {key: part.numpy() for key, part in zip(("first", "again"), stream(codec, x), strict=True)}
    np.savez_compressed(
        path, allow_pickle=False, spec=str(codec), dtype=str(dtype).removeprefix("torch."), **arrays
    )
    return path


def main(wanted: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for spec, dtype in cases():
        missing = not (FOLDER / name(parse(spec), dtype)).exists()
        if (spec in wanted) if wanted else missing:
            print(make(spec, dtype).name)


if __name__ == "__main__":
    main(sys.argv[1:])
