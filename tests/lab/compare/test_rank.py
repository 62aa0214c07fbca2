"""What a comparison's rank leaves behind between seeds."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from thinwire.lab.compare import scheme
from thinwire.lab.compare.rank import Contestant
from thinwire.lab.train.config import TrainConfig
from thinwire.lab.train.layout import Layout
from thinwire.lab.train.model import ModelConfig
from thinwire.lab.wiring import Wiring
from thinwire.launch import run_ranks

pytestmark = pytest.mark.usefixtures("kernels")


def _rounds(rank: int, world: int, report: Any) -> list[tuple[bool, int]]:
    config = TrainConfig(model=ModelConfig.preset("tiny"), layout=Layout(dp=2, tp=2, pp=1), eval_batches=1)
    found = []
    for _ in range(3):
        contestant = Contestant(scheme("balanced"), config, Wiring())
        contestant.run(range(1), "lo", timed=True)
        trainer = weakref.ref(contestant.trainer)
        contestant.close()
        del contestant
        gc.collect()
        found.append((trainer() is None, len(list(Path("/proc/self/task").iterdir()))))
    return found


def test_a_closed_contestant_is_collected_with_its_threads() -> None:
    for rounds in run_ranks(_rounds, 4, timeout=120, preload=("thinwire.lab.train",)):
        assert all(collected for collected, _ in rounds)
        assert rounds[2][1] <= rounds[1][1]
