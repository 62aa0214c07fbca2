"""Rows for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from ...report import text
from .plan import PLAIN
from .rows import Row

WIDTH = 104
"""Columns that a table needs."""


def table(rows: Sequence[Row]) -> Table:
    """The rows of one op, a section for each size."""
    link = any(row.x_link is not None for row in rows)
    shown = Table(
        title=f"{rows[0].op}: slowest rank's median; alg, bus, effective bandwidth in MB/s",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for left in ("size", "codec"):
        shown.add_column(left, no_wrap=True)
    titles = ["us", "x plain", "alg", "bus", "eff.", "wire/rank", "ratio", "rel. L2"]
    for title in [*titles, *(["x link"] if link else [])]:
        shown.add_column(title, justify="right", no_wrap=True)
    size = 0
    for row in rows:
        if size and row.nbytes != size:
            shown.add_section()
        plain = next(r.us for r in rows if r.nbytes == row.nbytes and r.contender == PLAIN.name)
        cells = [text.binary(row.nbytes) if row.nbytes != size else "", row.contender]
        cells += [text.significant(row.us), f"{row.us / plain:.2f}"]
        cells += [text.significant(v) for v in (row.alg_mb_s, row.bus_mb_s, row.effective_mb_s)]
        cells += [text.nbytes(row.wire_bytes), text.number(row.ratio)]
        cells += [f"{row.rel_l2:.1e}" if row.rel_l2 else "0"]
        if link:
            cells.append(text.number(row.x_link))
        shown.add_row(*cells)
        size = row.nbytes
    return shown
