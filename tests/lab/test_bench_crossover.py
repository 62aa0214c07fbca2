"""Crossover points: from rows to a table, and what the package makes of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from thinwire.lab.bench.collective.crossover import limit, write
from thinwire.lab.bench.collective.rows import Row


def row(contender: str, nbytes: int, us: float) -> Row:
    return Row("all_reduce", nbytes, contender, contender, us, us, 1.0, 1.5, 1.5, nbytes / 2, 2.0, 1e-3, None)


def test_the_limit_is_the_last_size_before_doubling_is_overtaken() -> None:
    times = {
        1024: (10.0, 20.0, 5.0),
        4096: (15.0, 20.0, 20.0),
        16384: (30.0, 21.0, 40.0),
        65536: (1.0, 2.0, 2.0),
    }
    rows = [
        row(name, nbytes, us)
        for nbytes, found in times.items()
        for name, us in zip(("bf16 recursive_doubling", "bf16", "bf16 hierarchical"), found, strict=True)
    ]
    header = 32
    assert limit(rows, "bf16", "two_shot", "fp32") == 2048 + header, "a later win does not count"
    assert limit(rows, "bf16", "hierarchical", "fp32") == 0


def test_the_table_keeps_what_was_measured_of_other_kinds(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    about = {"date": "today", "where": 'a "machine"', "command": "thinwire bench collective"}
    for kind, ranks, nbytes in (("flat", 8, 10), ("flat", 4, 20), ("layered", 8, 30), ("flat", 8, 40)):
        write(path, {"kind": kind, "ranks": ranks, "nbytes": nbytes} | about)
    entries = tomllib.loads(path.read_text())["crossover"]
    assert [(e["kind"], e["ranks"], e["nbytes"]) for e in entries] == [
        ("flat", 4, 20), ("flat", 8, 40), ("layered", 8, 30),
    ]  # fmt: skip
    assert all(e["where"] == 'a "machine"' for e in entries)
