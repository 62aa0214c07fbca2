"""Tensor to bytes and back. Imports nothing of torch.distributed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

from .base import Codec, Compressor
from .blockfloat import E3m0Codec, Fp8Codec, Mxfp4Codec, Mxfp8Codec, Nvfp4Codec
from .blockint import Int2Codec, Int3Codec, Int4Codec, Int5Codec, Int6Codec, Int8Codec
from .bounded import BoundedCodec
from .cast import Bf16Codec, Fp16Codec
from .chain import ChainCodec, Hadamard
from .coded import CodedCodec, Huffman
from .exponent import ExponentCodec
from .lowrank import LowRank
from .mpc import MpcCodec
from .none import NoneCodec
from .registry import list_codecs, register
from .sign import SignCodec
from .spec import parse, parse_compressor
from .topk import TopkCodec
from .zfp import ZfpCodec

# In an order that shares out their compilation evenly: every second one is about half of it.
_WITH_KERNELS = (
    "exponent",
    "zfp:rate=8",
    "int8",
    "fp8",
    "topk",
    "bounded:abs=1",
    "sign",
    "int4|huffman",
    "int4",
    "lowrank",
    "mpc:dim=1",
)

__all__ = [
    "Bf16Codec",
    "BoundedCodec",
    "ChainCodec",
    "Codec",
    "CodedCodec",
    "Compressor",
    "E3m0Codec",
    "ExponentCodec",
    "Fp8Codec",
    "Fp16Codec",
    "Hadamard",
    "Huffman",
    "Int2Codec",
    "Int3Codec",
    "Int4Codec",
    "Int5Codec",
    "Int6Codec",
    "Int8Codec",
    "LowRank",
    "MpcCodec",
    "Mxfp4Codec",
    "Mxfp8Codec",
    "NoneCodec",
    "Nvfp4Codec",
    "SignCodec",
    "TopkCodec",
    "ZfpCodec",
    "list_codecs",
    "parse",
    "parse_compressor",
    "register",
    "warm_up",
]


def warm_up(specs: Iterable[str | Compressor] | None = None, *, processes: int = 1) -> None:
    """Compile the CPU kernels of these compressors (None: of every one here that has some), or load them from the cache.

    Takes seconds to minutes the first time on a machine. Call it before ranks start, and once in every rank.
    processes: compile in so many at a time, then load what they have compiled. Worth it on a new machine only: each of
    them imports torch. Raises CalledProcessError if one of them fails.
    """
    chosen = [parse_compressor(spec) for spec in (_WITH_KERNELS if specs is None else specs)]
    command = "import sys; from thinwire.codecs import warm_up; warm_up(sys.argv[1:])"
    parts = [list(map(str, chosen[i::processes])) for i in range(1, processes)]
    others = [subprocess.Popen([sys.executable, "-c", command, *part]) for part in parts if part]
    try:
        for compressor in chosen[::processes]:
            compressor.warm_up()
        for other in others:
            if other.wait():
                raise subprocess.CalledProcessError(other.returncode, other.args)
    finally:
        for other in others:
            other.kill()
            other.wait()
    for i, compressor in enumerate(chosen):
        if i % processes:  # of another process
            compressor.warm_up()
