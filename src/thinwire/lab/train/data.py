"""Training text as tokens, and which of them a step sees: a pure function of (seed, step), whatever the layout."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinwire.errors import DataError

if TYPE_CHECKING:
    from .config import DataConfig

_NOT_SOURCES = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
_SEPARATOR = b"\n\n"


@dataclass(frozen=True)
class Text:
    """Tokens (uint8 or int32, 1-D): a part to train on and a part held out, and a digest of both."""

    train: npt.NDArray[np.integer]
    validation: npt.NDArray[np.integer]
    digest: str


def load_text(config: DataConfig, vocab: int, cache: Path | None = None) -> Text:
    """Read and tokenize the text of ``config``; every rank that does so gets the same.

    vocab: number of tokens that BPE learns. cache: folder for the BPE result, which takes long to train.
    Raises DataError for a path that does not exist or text that is empty.
    """
    text = _read(config)
    if config.tokens == "byte":
        tokens: npt.NDArray[np.integer] = np.frombuffer(text, dtype=np.uint8)
    else:
        tokens = _bpe(text, vocab, cache)
    held_out = int(len(tokens) * config.validation)
    split = len(tokens) - held_out
    return Text(tokens[:split], tokens[split:], hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest())


class Batches:
    """Batches of consecutive tokens, (sequences, sequence + 1) int64.

    An epoch visits every piece of the text once, in an order drawn from (seed, epoch). Raises DataError for a
    text shorter than one sequence.
    """

    def __init__(self, tokens: npt.NDArray[np.integer], sequence: int, global_batch: int, seed: int) -> None:
        self._tokens = tokens
        self._sequence = sequence
        self._batch = global_batch
        self._seed = seed
        self._pieces = (len(tokens) - 1) // sequence
        if self._pieces < 1:
            raise DataError(
                f"the text has {len(tokens)} tokens in this part, but one sequence takes {sequence + 1}: "
                "give more text or a shorter sequence"
            )

    def global_batch(self, step: int) -> Tensor:
        """The sequences of step ``step`` (from 0)."""
        return self.part(step, 0, 1)

    def part(self, step: int, rank: int, ranks: int) -> Tensor:
        """Data-parallel rank ``rank``'s consecutive share of the sequences of step ``step``."""
        share = self._batch // ranks
        first = step * self._batch + rank * share
        begins = [self._piece(i) * self._sequence for i in range(first, first + share)]
        rows = np.stack([self._tokens[b : b + self._sequence + 1] for b in begins])
        return torch.from_numpy(rows.astype(np.int64))

    def _piece(self, index: int) -> int:
        epoch, position = divmod(index, self._pieces)
        return int(_order(self._seed, epoch, self._pieces)[position])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, pieces: int) -> npt.NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(pieces)


def _read(config: DataConfig) -> bytes:
    """All documents, up to max_bytes, in the order of a hash of their names: the end is a fair sample."""
    parts, size = [], 0
    for path in sorted(_documents(config.paths), key=lambda d: hashlib.sha256(d[0].encode()).digest()):
        try:
            document = path[1].read_bytes()
        except OSError as e:
            raise DataError(f"cannot read {path[1]}: {e.strerror}") from None
        if document:
            parts.append(document)
            size += len(document) + len(_SEPARATOR)
        if size >= config.max_bytes:
            break
    if not parts:
        raise DataError(
            f"no text in {', '.join(config.paths) or 'the standard library'}: all files are empty"
        )
    return _SEPARATOR.join(parts)[: config.max_bytes]


def _documents(paths: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """(name, file) of every document; names are relative, so that they do not depend on where a folder lies."""
    if not paths:
        root = Path(sysconfig.get_path("stdlib"))
        for folder, folders, files in os.walk(root):
            folders[:] = [f for f in folders if f not in _NOT_SOURCES]
            for file in files:
                if file.endswith(".py"):
                    path = Path(folder, file)
                    yield path.relative_to(root).as_posix(), path
        return
    for given in map(Path, paths):
        if given.is_dir():
            for path in given.rglob("*"):
                if path.is_file():
                    yield path.relative_to(given).as_posix(), path
        elif given.exists():
            yield given.name, given
        else:
            raise DataError(f"{given} does not exist: give a file or a folder of text")


def _bpe(text: bytes, vocab: int, cache: Path | None) -> npt.NDArray[np.int32]:
    key = hashlib.blake2b(text, digest_size=8, salt=vocab.to_bytes(8, "little")).hexdigest()
    stored = cache / f"bpe-{vocab}-{key}.npy" if cache is not None else None
    if stored is not None and stored.exists():
        loaded: npt.NDArray[np.int32] = np.load(stored)
        return loaded
    tokens = _train_bpe(text.decode("utf-8", errors="replace"), vocab)
    if stored is not None:
        stored.parent.mkdir(parents=True, exist_ok=True)
        # Several ranks may write the same bytes at once: each to a name of its own, then one rename.
        temporary = stored.with_name(f"{stored.name}.{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            np.save(file, tokens)
        temporary.replace(stored)
    return tokens


def _train_bpe(text: str, vocab: int) -> npt.NDArray[np.int32]:
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise DataError("tokens = 'bpe' needs the package 'tokenizers': pip install thinwire[lab]") from None
    if vocab < 257:
        raise DataError(f"BPE needs a vocabulary of more than the 256 bytes, not {vocab}: raise model.vocab")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pieces = [text[i : i + (1 << 16)] for i in range(0, len(text), 1 << 16)]
    tokenizer.train_from_iterator(pieces, trainer)
    ids = [np.asarray(e.ids, dtype=np.int32) for e in tokenizer.encode_batch(pieces)]
    return np.concatenate(ids)
