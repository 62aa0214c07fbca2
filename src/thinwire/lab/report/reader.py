"""JSON values into dataclasses, by their type hints, with errors that say where and what."""

from __future__ import annotations

import dataclasses
import math
import types
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ...errors import ThinwireError, nearest

T = TypeVar("T")

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # how bench.record writes them


class ResultError(ThinwireError, ValueError):
    """A result file that is not what the report reads: where in it, what was found, what is expected."""


def read(kind: type[T], value: Any, where: str) -> T:
    """``value`` (from ``json.load``) as a ``kind``, a dataclass.

    A field with a default may be missing, a field that is ``X | None`` may be null; unknown fields are refused,
    so that a misspelt one is not dropped. ``where`` names the value in errors. Raises ResultError.
    """
    found = _read(kind, value, where)
    assert isinstance(found, kind)
    return found


def _read(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _read_object(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (a for a in arguments if a is not types.NoneType)
        return _read(kind, value, where)
    if origin is Literal:
        if value not in arguments:
            raise _unexpected(where, "one of " + ", ".join(map(repr, arguments)), value)
        return value
    if origin is list:
        items = _expect(list, "a list", value, where)
        return [_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(items)]
    if origin is tuple:
        items = _expect(list, f"a list of {len(arguments)}", value, where)
        if len(items) != len(arguments):
            raise _unexpected(where, f"a list of {len(arguments)}", value)
        return tuple(
            _read(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(arguments, items, strict=True))
        )
    if origin is dict:
        entries = _expect(dict, "an object", value, where)
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in entries.items()}
    return _read_scalar(kind, value, where)


def _read_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float:
        if isinstance(value, str) and value in _SPECIAL:
            return _SPECIAL[value]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _unexpected(where, "a number", value)
        return float(value)
    if kind is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _unexpected(where, "an integer", value)
        return value
    return _expect(kind, {str: "a string", bool: "true or false"}[kind], value, where)


def _read_object(kind: Any, value: Any, where: str) -> Any:
    entries = _expect(dict, "an object", value, where)
    hints = _hints(kind)
    for key in entries:
        if key not in hints:
            raise ResultError(f"{where}: unknown field {key!r}; {nearest(key, hints)}")
    fields = {}
    for field in dataclasses.fields(kind):
        if field.name in entries:
            fields[field.name] = _read(hints[field.name], entries[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ResultError(f"{where}: field {field.name!r} is missing")
    try:
        return kind(**fields)
    except ResultError as e:
        raise ResultError(f"{where}: {e}") from None


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _expect(kind: type, words: str, value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        raise _unexpected(where, words, value)
    return value


def _unexpected(where: str, expected: str, value: Any) -> ResultError:
    shown = repr(value)
    return ResultError(
        f"{where}: expected {expected}, found {shown if len(shown) < 60 else shown[:57] + '...'}"
    )
