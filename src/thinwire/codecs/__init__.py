"""Tensor to bytes and back. Imports nothing of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterable

from .base import Codec
from .blockfloat import E3m0Codec, Fp8Codec, Mxfp4Codec, Mxfp8Codec, Nvfp4Codec
from .blockint import Int2Codec, Int3Codec, Int4Codec, Int5Codec, Int6Codec, Int8Codec
from .bounded import BoundedCodec
from .cast import Bf16Codec, Fp16Codec
from .chain import ChainCodec, Hadamard
from .coded import CodedCodec, Huffman
from .exponent import ExponentCodec
from .mpc import MpcCodec
from .none import NoneCodec
from .registry import list_codecs, register
from .sign import SignCodec
from .spec import parse
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
)

__all__ = [
    "Bf16Codec",
    "BoundedCodec",
    "ChainCodec",
    "Codec",
    "CodedCodec",
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
    "register",
    "warm_up",
]


def warm_up(specs: Iterable[str | Codec] | None = None) -> None:
    """Compile the CPU kernels of these codecs (None: of every codec here that has some), or load them from the cache.

    Takes seconds the first time on a machine. Call it before ranks start, and once in every rank.
    """
    for spec in _WITH_KERNELS if specs is None else specs:
        parse(spec).warm_up()
