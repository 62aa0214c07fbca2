"""Tensor to bytes and back. Imports nothing of torch.distributed."""

from __future__ import annotations

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

_WITH_KERNELS = (
    "int8",
    "int4",
    "zfp:rate=8",
    "mpc:dim=1",
    "exponent",
    "fp8",
    "sign",
    "topk",
    "bounded:abs=1",
    "int4|huffman",
    "lowrank",
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


def warm_up(specs: Iterable[str | Compressor] | None = None) -> None:
    """Compile the CPU kernels of these compressors (None: of every one here that has some), or load them from the cache.

    Takes seconds the first time on a machine. Call it before ranks start, and once in every rank.
    """
    for spec in _WITH_KERNELS if specs is None else specs:
        parse_compressor(spec).warm_up()
