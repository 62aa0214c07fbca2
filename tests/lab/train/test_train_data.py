from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import DataError
from thinwire.lab.train.config import DataConfig
from thinwire.lab.train.data import Batches, load_text


def make_batches(tokens: int = 1000, global_batch: int = 8, seed: int = 0) -> Batches:
    return Batches(np.arange(tokens, dtype=np.int32), 10, global_batch, seed)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_ranks_parts_are_the_global_batch(ranks: int) -> None:
    whole = make_batches().global_batch(3)
    assert whole.shape == (8, 11)
    assert torch.equal(torch.cat([make_batches().part(3, r, ranks) for r in range(ranks)]), whole)


def test_a_batch_depends_on_seed_and_step_only() -> None:
    forward, backward = make_batches(), make_batches()
    steps = [forward.global_batch(s) for s in range(30)]
    assert all(torch.equal(backward.global_batch(s), steps[s]) for s in reversed(range(30)))
    assert not torch.equal(make_batches(seed=1).global_batch(0), steps[0])


def test_an_epoch_visits_every_piece_once_and_the_next_in_another_order() -> None:
    batches = make_batches(tokens=801)  # 80 pieces: 10 steps of 8
    epochs = [torch.cat([batches.global_batch(10 * e + s) for s in range(10)])[:, 0] for e in range(2)]
    assert all(sorted(first.tolist()) == list(range(0, 800, 10)) for first in epochs)
    assert not torch.equal(*epochs)


def test_text_is_the_same_wherever_its_folder_lies(tmp_path: Path) -> None:
    texts = []
    for place in ("a", "b/c"):
        folder = tmp_path / place
        (folder / "sub").mkdir(parents=True)
        (folder / "one.txt").write_text("first document " * 20)
        (folder / "sub" / "two.txt").write_text("second document " * 20)
        texts.append(load_text(DataConfig(paths=(str(folder),)), 256))
    assert texts[0].digest == texts[1].digest
    size = len("first document " * 20) + len("second document " * 20) + 2
    assert len(texts[0].train) + len(texts[0].validation) == size
    assert len(texts[0].validation) == int(size * 0.05)


def test_the_default_text_is_the_standard_library() -> None:
    config = DataConfig(max_bytes=100_000)
    text = load_text(config, 256)
    assert len(text.train) + len(text.validation) == 100_000
    assert b"def " in text.train.tobytes()
    assert load_text(config, 256).digest == text.digest


def test_bpe_is_deterministic_and_cached(tmp_path: Path) -> None:
    config = DataConfig(tokens="bpe", max_bytes=30_000)
    text = load_text(config, 400, tmp_path)
    assert int(text.train.max()) < 400
    assert len(text.train) < 25_000  # fewer tokens than bytes
    assert [p.suffix for p in tmp_path.iterdir()] == [".npy"]
    assert load_text(config, 400, tmp_path).digest == text.digest
    assert load_text(config, 400).digest == text.digest


def test_unusable_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_text(DataConfig(paths=(str(tmp_path / "missing"),)), 256)
    with pytest.raises(DataError, match="no text"):
        load_text(DataConfig(paths=(str(tmp_path),)), 256)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="no text"):
        load_text(DataConfig(paths=(str(tmp_path),)), 256)
    with pytest.raises(DataError, match=r"10 tokens .* takes 11"):
        make_batches(tokens=10)
    with pytest.raises(DataError, match="more than the 256 bytes"):
        load_text(DataConfig(tokens="bpe", max_bytes=1000), 256)
