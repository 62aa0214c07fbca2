"""Result JSON -> figures and one self-contained HTML page. It measures nothing.

schema    what a result holds, and ``load``
parity    the paired test of loss parity
summary   one row per policy
figures   the figures; figures_loss, figures_cost, figures_link draw them, style says how they look
page      the HTML page; tables, text and css are its parts
"""

from __future__ import annotations

import os
from pathlib import Path

from .parity import paired_test, parity_of
from .reader import ResultError
from .schema import Parity, Result, from_dict, load
from .summary import summarise

__all__ = [
    "Parity", "Result", "ResultError", "from_dict", "load", "paired_test", "parity_of", "summarise", "write_report",
]  # fmt: skip


def write_report(result: Result | str | os.PathLike[str], out_dir: str | os.PathLike[str]) -> list[Path]:
    """Write ``report.html`` and one PNG per figure to ``out_dir`` (made if missing); return their paths, page first.

    result: a Result, or the path of a ``result.json``. Figures that the result has no data for are left out.
    Raises ResultError for a file that is not a result.
    """
    from .figures import draw_all  # matplotlib is imported only by those who draw
    from .page import render

    if not isinstance(result, Result):
        result = load(result)
    summary = summarise(result)
    drawn = draw_all(result, summary)
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    page.write_text(render(result, summary, drawn), encoding="utf-8")
    written = [page]
    for figure in drawn:
        path = folder / f"{figure.name}.png"
        path.write_bytes(figure.png)
        written.append(path)
    return written
