"""The table of public reports names tests that there are, and they name the reports."""

from __future__ import annotations

import ast
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/reports.md").read_text().splitlines()
    if re.match(r"\| \d", line)
]
NUMBERED = r"[\w-]+ \d+"


def reports(row: list[str]) -> list[str]:
    """A row's reports as comments name them; those without a number of their own by that of the row."""
    return re.findall(NUMBERED, row[1]) or [f"report {row[0]}"]


@cache
def comments(path: Path) -> str:
    with path.open("rb") as file:
        return "\n".join(t.string for t in tokenize.tokenize(file.readline) if t.type == tokenize.COMMENT)


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def named(row: list[str]) -> list[tuple[Path, str]]:
    return [(ROOT / path, test) for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[4])]


def has(path: Path, report: str) -> bool:
    return re.search(rf"{re.escape(report)}\b", comments(path)) is not None


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_report_has_a_test_or_is_said_to_have_none(row: list[str]) -> None:
    tests = named(row)
    assert bool(tests) != (row[4] == "not covered")
    for path, test in tests:
        assert test in functions_of(path)
        assert any(has(path, report) for report in reports(row)), f"{path} names none of {reports(row)}"
    for report in reports(row):
        assert not tests or any(has(path, report) for path, _ in tests), f"no test names {report}"


def test_every_report_that_a_test_names_is_in_the_table() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 42))
    known = {report for row in ROWS for report in reports(row)}
    projects = "|".join({re.escape(report.rsplit(" ", 1)[0]) for report in known})
    found = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__)
        for name in re.findall(rf"\b(?:{projects}) \d+", comments(path))
    }
    assert found <= known
