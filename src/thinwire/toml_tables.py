"""TOML files and their tables: read with the file's name in every error, unknown keys refused."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .errors import SpecError, nearest


def read(path: Path, what: str) -> dict[str, Any]:
    """The tables of a file. what: in words, for errors. Raises SpecError if it does not exist or is not TOML."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise SpecError(f"{what} {path} does not exist") from None
    except tomllib.TOMLDecodeError as e:
        raise SpecError(f"{what} {path}: {e}") from None


def checked_table(table: Any, where: str) -> Mapping[str, Any]:
    """``table``. Raises SpecError if it is none."""
    if not isinstance(table, Mapping):
        raise SpecError(f"{where}: a table is needed, found {table!r}")
    return table


def check_keys(table: Any, names: Collection[str], where: str) -> None:
    """Raise SpecError for a key that is not one of ``names``, or for what is no table."""
    for key in checked_table(table, where):
        if key not in names:
            raise SpecError(f"{where}: unknown key {key!r}; {nearest(key, names)}")
