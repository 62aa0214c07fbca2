"""Residuals beside Lightning's checkpoints: what is read back, and what is refused."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.errors import CheckpointError
from thinwire.integrate.lightning_files import KEY, Mark, contents, rank_path, read

MARK = Mark("a1", 2, "balanced dp[...]")


def write(checkpoint: Path, rank: int = 1, mark: Mark = MARK) -> None:
    path = Path(rank_path(checkpoint, rank))
    path.parent.mkdir(exist_ok=True)
    torch.save(contents(mark, [{"w@dp": torch.ones(3)}]), path)


def read_back(checkpoint: Path, mark: Mark = MARK, rank: int = 1, **run: Any) -> list[dict[str, Any]]:
    run = {"ranks": 2, "policy": MARK.policy, **run}
    return read(checkpoint, asdict(mark), rank, load=lambda p: torch.load(p, weights_only=True), **run)


def test_each_rank_has_its_own(tmp_path: Path) -> None:
    checkpoint = tmp_path / "epoch=0.ckpt"
    write(checkpoint)
    (state,) = read_back(checkpoint)
    assert torch.equal(state["w@dp"], torch.ones(3))
    assert KEY in contents(MARK, [])
    assert Path(rank_path(checkpoint, 1)) == tmp_path / "thinwire-rank1" / "epoch=0.ckpt"
    assert rank_path("s3://bucket/run/a.ckpt", 0) == "s3://bucket/run/thinwire-rank0/a.ckpt"
    link = tmp_path / "last.ckpt"
    checkpoint.touch()
    link.symlink_to(checkpoint.name)
    assert read_back(link)


def test_what_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "a.ckpt"
    with pytest.raises(
        CheckpointError, match=r"residuals of rank 1 in .*rank1/a\.ckpt, which does not exist"
    ):
        read_back(checkpoint)
    with pytest.raises(CheckpointError, match=r"residuals of 2 ranks, and this run has 4: resume with 2, or"):
        read_back(checkpoint, ranks=4)
    with pytest.raises(CheckpointError, match=r"written under policy balanced .* and this run has bf16"):
        read_back(checkpoint, policy="bf16")
    write(checkpoint, mark=replace(MARK, id="b2"))
    with pytest.raises(CheckpointError, match=r"another saving .* resume_without_residuals=True"):
        read_back(checkpoint)
