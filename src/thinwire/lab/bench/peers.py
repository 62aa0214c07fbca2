"""Compressors of other libraries, for comparison: those that are installed, at settings their users choose for speed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Peer:
    """Another library's compressor. encode: flat values -> bytes; decode: bytes, the values (for dtype and size)."""

    name: str
    lossless: bool
    dtypes: frozenset[torch.dtype]
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any, Tensor], Tensor]


_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_FP32 = frozenset({torch.float32})


def installed_peers() -> list[Peer]:
    """Every peer whose library can be imported."""
    found = []
    for module, make in _MAKERS:
        try:
            library = importlib.import_module(module)
        except ImportError:
            continue
        found += make(library)
    return found


def _words(x: Tensor) -> Any:
    """The values as numpy holds them: bf16, which it lacks, as uint16."""
    return x.numpy() if x.dtype != torch.bfloat16 else x.view(torch.uint16).numpy()


def _values(words: Any, like: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(words)).view(like.dtype)


def _zfpy(zfpy: Any) -> list[Peer]:
    def peer(rate: int) -> Peer:
        def encode(x: Tensor) -> bytes:
            packed: bytes = zfpy.compress_numpy(x.numpy(), rate=rate, write_header=True)
            return packed

        def decode(data: bytes, like: Tensor) -> Tensor:
            return _values(zfpy.decompress_numpy(data), like)

        return Peer(f"zfpy rate {rate}", False, _FP32, encode, decode)

    return [peer(8), peer(16)]


def _zstandard(zstandard: Any) -> list[Peer]:
    packer, unpacker = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def encode(x: Tensor) -> bytes:
        packed: bytes = packer.compress(_words(x).data.cast("B"))
        return packed

    def decode(data: bytes, like: Tensor) -> Tensor:
        return torch.frombuffer(bytearray(unpacker.decompress(data)), dtype=like.dtype)

    return [Peer("zstd level 1", True, _FLOATS, encode, decode)]


def _blosc2(blosc2: Any) -> list[Peer]:
    blosc2.set_nthreads(1)

    def encode(x: Tensor) -> bytes:
        packed: bytes = blosc2.compress2(
            _words(x),
            codec=blosc2.Codec.ZSTD,
            clevel=1,
            typesize=x.element_size(),
            filters=[blosc2.Filter.SHUFFLE],
        )
        return packed

    def decode(data: bytes, like: Tensor) -> Tensor:
        return torch.frombuffer(bytearray(blosc2.decompress2(data)), dtype=like.dtype)

    return [Peer("blosc2 shuffle, zstd 1", True, _FLOATS, encode, decode)]


def _zipnn(zipnn: Any) -> list[Peer]:
    formats = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    coders = {dtype: zipnn.ZipNN(bytearray_dtype=name, threads=1) for dtype, name in formats.items()}

    def encode(x: Tensor) -> Any:
        return coders[x.dtype].compress(bytearray(_words(x).data.cast("B")))

    def decode(data: Any, like: Tensor) -> Tensor:
        return torch.frombuffer(bytearray(coders[like.dtype].decompress(data)), dtype=like.dtype)

    return [Peer("zipnn", True, frozenset(formats), encode, decode)]


def _pcodec(standalone: Any) -> list[Peer]:
    config = importlib.import_module("pcodec").ChunkConfig(compression_level=4)

    def encode(x: Tensor) -> bytes:
        packed: bytes = standalone.simple_compress(_words(x), config)
        return packed

    def decode(data: bytes, like: Tensor) -> Tensor:
        return _values(standalone.simple_decompress(data), like)

    return [Peer("pcodec level 4", True, _FLOATS, encode, decode)]


_MAKERS: tuple[tuple[str, Callable[[Any], list[Peer]]], ...] = (
    ("zfpy", _zfpy),
    ("zstandard", _zstandard),
    ("blosc2", _blosc2),
    ("zipnn", _zipnn),
    ("pcodec.standalone", _pcodec),
)
