"""Numbers about captured messages: entropy bounds, what lossless codecs reach, what lossy ones lose, spectra."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ....codecs import Codec, parse
from ....testing import decode, encode
from .capture import Role

LOSSLESS = ("exponent", "mpc:dim=1")
LOSSY = (
    "bf16", "int8", "int6", "int5", "int4", "hadamard|int4", "int3", "int2", "fp8", "mxfp8", "mxfp4", "nvfp4", "e3m0",
    "sign", "topk", "int8|huffman", "int4|huffman", "int2|huffman", "zfp:rate=8", "zfp:rate=12", "zfp:rate=16",
    "bounded:rel=0.001",
)  # fmt: skip
RANKS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of leading singular values whose share of a gradient's energy is given."""
_EXPONENT_BITS = {torch.float32: 8, torch.float16: 5, torch.bfloat16: 8}


@dataclass(frozen=True)
class Coded:
    """What a codec made of a message. ratio: raw bytes / payload bytes; rel_l2: error's norm over the values'."""

    ratio: float
    bits: float
    """Payload bits per value."""
    rel_l2: float


@dataclass(frozen=True)
class Record:
    """One role in one phase of one precision's run."""

    role: str
    phase: str
    precision: str
    dtype: str
    numel: int
    rms: float
    zeros: float
    """Share of values that are zero."""
    exponent_bound: float
    """Highest ratio of any code for single exponents, with signs and mantissas as they are."""
    order0_bound: float
    """The same for whole 16-bit values; for fp32, for its four bytes each by itself."""
    codecs: dict[str, Coded] = field(default_factory=dict)
    """By spec, as LOSSLESS and LOSSY have it."""


def measure_roles(messages: Mapping[tuple[Role, str], Tensor], precision: str) -> list[Record]:
    """A record for each role and phase."""
    records = []
    for (role, phase), x in messages.items():
        wanted = {spec: parse(spec) for spec in (*LOSSLESS, *LOSSY)}
        coded = {spec: _code(codec, x) for spec, codec in wanted.items() if x.dtype in codec.dtypes}
        records.append(
            Record(
                role=str(role),
                phase=phase,
                precision=precision,
                dtype=str(x.dtype).removeprefix("torch."),
                numel=x.numel(),
                rms=float(x.double().square().mean().sqrt()),
                zeros=float((x == 0).double().mean()),
                exponent_bound=exponent_bound(x),
                order0_bound=order0_bound(x),
                codecs=coded,
            )
        )
    return records


def _code(codec: Codec, x: Tensor) -> Coded:
    payload = encode(codec, x)
    error = decode(codec, payload, x).double() - x.double()
    norm = float(x.double().norm()) or 1.0
    return Coded(x.nbytes / payload.numel(), 8 * payload.numel() / x.numel(), float(error.norm()) / norm)


def exponent_bound(x: Tensor) -> float:
    """Bits of a value over (sign and mantissa + the entropy of the exponents)."""
    width, exponent_bits = 8 * x.dtype.itemsize, _EXPONENT_BITS[x.dtype]
    exponents = _words(x) >> (width - 1 - exponent_bits) & ((1 << exponent_bits) - 1)
    return width / (width - exponent_bits + entropy(np.bincount(exponents)))


def order0_bound(x: Tensor) -> float:
    """Bits of a value over its order-0 entropy: of the 16-bit word, or of each byte of an fp32 value by itself."""
    words = _words(x)
    if x.dtype.itemsize == 2:
        return 16 / max(entropy(np.bincount(words)), 1e-9)
    planes = sum(entropy(np.bincount(words >> shift & 255)) for shift in (0, 8, 16, 24))
    return 32 / max(planes, 1e-9)


def entropy(counts: Sequence[int] | np.ndarray) -> float:
    """Shannon entropy in bits of a histogram."""
    kept = np.asarray(counts, np.float64)
    shares = kept[kept > 0] / kept.sum()
    return float(-(shares * np.log2(shares)).sum())


def _words(x: Tensor) -> np.ndarray:
    """The values' bits as int64."""
    narrow = {2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    mask = (1 << 8 * x.dtype.itemsize) - 1
    found: np.ndarray = x.contiguous().view(narrow).numpy().astype(np.int64) & mask
    return found


@dataclass(frozen=True)
class Spectrum:
    """The singular values of one weight's gradient. energy: share of its square norm in the RANKS largest ones."""

    weight: str
    phase: str
    precision: str
    shape: tuple[int, int]
    energy: dict[int, float]
    stable_rank: float
    """Square norm over the largest singular value's square: 1 for rank one, up to min(shape)."""


def measure_spectra(gradients: Mapping[str, Mapping[str, Tensor]], precision: str) -> list[Spectrum]:
    """A spectrum for each phase and weight."""
    return [
        spectrum(name, phase, precision, gradient)
        for phase, weights in gradients.items()
        for name, gradient in weights.items()
    ]


def spectrum(weight: str, phase: str, precision: str, gradient: Tensor) -> Spectrum:
    """The spectrum of a matrix. A gradient of zeros has all its energy in the first value."""
    squares = torch.linalg.svdvals(gradient.double()).square()
    total = float(squares.sum())
    shares = (squares / total if total else torch.eye(1, len(squares), dtype=torch.float64)[0]).cumsum(0)
    energy = {rank: float(shares[min(rank, len(shares)) - 1]) for rank in RANKS}
    stable = total / float(squares[0]) if total else 1.0
    return Spectrum(weight, phase, precision, (gradient.shape[0], gradient.shape[1]), energy, stable)


def mean_energy(spectra: Iterable[Spectrum]) -> dict[int, float]:
    """Mean over weights of the share of energy in the leading singular values."""
    rows = [s.energy for s in spectra]
    return {rank: float(np.mean([row[rank] for row in rows])) for rank in RANKS}
