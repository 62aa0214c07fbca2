"""Where one algorithm of all-reduce overtakes another: from a benchmark's rows to the table that comes with the package."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from .... import wire
from ....codecs import parse
from ....collectives.options import Algorithm
from ...dtypes import DTYPES
from .rows import Row

DOUBLING: Algorithm = "recursive_doubling"


def limit(rows: Sequence[Row], codec: str, against: Algorithm, dtype: str) -> int:
    """Encoded bytes of the largest message up to which doubling was the faster one for all smaller ones, too; 0: none.

    rows: of all_reduce, with contenders named as :func:`~thinwire.lab.bench.collective.plan.contenders` does.
    """
    other = codec if against == "two_shot" else f"{codec} {against}"
    times: dict[int, dict[str, float]] = {}
    for row in rows:
        times.setdefault(row.nbytes, {})[row.contender] = row.us
    found = 0
    for nbytes, by_name in sorted(times.items()):
        if by_name[f"{codec} {DOUBLING}"] >= by_name[other]:
            break
        kind = DTYPES[dtype]
        found = wire.max_frame_nbytes(parse(codec), nbytes // kind.itemsize, kind)
    return found


_HEAD = """\
# Encoded bytes of an all-reduced message up to which recursive doubling is the fastest algorithm, by number of
# ranks; for other numbers, that of the largest one that is not above. flat: against two_shot; layered (several
# hosts with several ranks each): against hierarchical. Written by: thinwire bench collective --crossover FILE
"""


def write(path: Path, entry: Mapping[str, str | int]) -> None:
    """Put an entry into the table at ``path``, in place of the one of its kind and number of ranks.

    entry: kind (flat, layered), ranks, nbytes, and what it was measured with: date, where, command.
    """
    table = tomllib.loads(path.read_text()) if path.exists() else {}
    entries = {(old["kind"], old["ranks"]): old for old in table.get("crossover", [])}
    entries[entry["kind"], entry["ranks"]] = entry
    texts = [
        "\n".join(["", "[[crossover]]", *(f"{key} = {json.dumps(value)}" for key, value in e.items())])
        for _, e in sorted(entries.items())
    ]
    path.write_text(_HEAD + "\n".join(texts) + "\n")
