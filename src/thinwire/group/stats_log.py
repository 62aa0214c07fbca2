"""What a rank has sent, as a file of JSON lines: for plots of a run, after it or while it goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .statistics import Stats, stats


class StatsLog:
    """Appends :func:`thinwire.stats` to a file, one line a call of :meth:`log`. ::

        log = thinwire.StatsLog("sent.jsonl")  # rank 3 writes sent.rank3.jsonl
        for step in range(steps):
            ...
            if step % 100 == 0:
                log.log(step, loss=float(loss))

    Each rank has a file of its own, and no rank waits for another: make one on rank 0 alone if that is enough (errors of
    encoding are the same on all ranks of a group, bytes nearly so). path: as it would be without ranks; folders are made.
    rank: None: the default process group's, 0 without one. source: where the numbers come from; about: what each line says
    besides.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rank: int | None = None,
        source: Callable[[], Stats] = stats,
        **about: Any,
    ) -> None:
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
        self.path = rank_path(path, rank)
        self._head = {"rank": rank, **about}
        self._source = source
        self._start_s = time.monotonic()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def log(self, step: int | None = None, **values: Any) -> None:
        """Append a line: rank, seconds since the log was made, step, the values, and what was sent so far, by message.

        values: of JSON's types. Sums run from the start of each group, so a line less an earlier one is what lies between
        them.
        """
        record = {**self._head, "seconds": round(time.monotonic() - self._start_s, 3)}
        if step is not None:
            record["step"] = step
        record |= {**values, "messages": self._source().as_dicts()}
        line = json.dumps(record) + "\n"  # before the file is opened: a value that JSON lacks leaves it whole
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)


def rank_path(path: str | Path, rank: int) -> Path:
    """FILE.jsonl -> FILE.rankN.jsonl."""
    whole = Path(path)
    return whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix or '.jsonl'}")
