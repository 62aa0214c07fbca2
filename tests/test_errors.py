from __future__ import annotations

import inspect
import re

import pytest

from thinwire import errors
from thinwire.errors import RankError, ThinwireError, nearest

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_has_one_base_and_a_docstring(cls: type[Exception]) -> None:
    assert issubclass(cls, ThinwireError)
    assert cls.__doc__


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = set(re.findall(r"\+-- (\w+)", errors.__doc__ or "")) | {"ThinwireError"}
    assert drawn == {c.__name__ for c in CLASSES}


def test_errors_are_also_the_builtin_kind_that_code_expects() -> None:
    assert issubclass(errors.SpecError, ValueError)
    assert issubclass(errors.UnsupportedError, TypeError)
    assert issubclass(errors.PeerError, RuntimeError)


def test_rank_error_keeps_rank_and_traceback() -> None:
    e = RankError("rank 2 failed", 2, "Traceback ...")
    assert (e.rank, e.traceback, str(e)) == (2, "Traceback ...", "rank 2 failed")


def test_nearest_offers_close_names_else_all() -> None:
    assert nearest("balansed", ["balanced", "none"]) == "did you mean 'balanced'?"
    assert nearest("xyz", ["b", "a"]) == "known: a, b"
