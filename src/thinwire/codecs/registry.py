"""Specs to codecs: ``parse("int4:block=128")``; codecs of other packages come through entry points.

A spec is ``NAME`` or ``NAME:key=value,key=value``; ``NAME:value`` gives the first parameter. Parameters
are the fields of the codec's dataclass. ``str(codec)`` is the full spec and parses back to an equal codec.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from ..errors import SpecError, nearest
from .base import Codec

_CODECS: dict[str, type[Codec]] = {}
_BOOLEANS = {"true": True, "false": False}
ENTRY_POINT_GROUP = "thinwire.codecs"


def register(cls: type[Codec]) -> type[Codec]:
    """Class decorator: make a codec known under ``cls.name``. A name can be taken once."""
    known = _CODECS.get(cls.name)
    if known is not None and known is not cls:
        raise SpecError(f"codec name {cls.name!r} is taken by {known.__module__}.{known.__qualname__}")
    _CODECS[cls.name] = cls
    return cls


@cache
def _load_entry_points() -> None:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        register(point.load())


def list_codecs() -> dict[str, type[Codec]]:
    """All known codecs by name, those of other packages included."""
    _load_entry_points()
    return dict(sorted(_CODECS.items()))


def parse(spec: str | Codec) -> Codec:
    """The codec of a spec. Raises SpecError with the position of what is wrong and the nearest names."""
    if isinstance(spec, Codec):
        return spec
    name, colon, rest = spec.partition(":")
    known = list_codecs()
    if name not in known:
        raise SpecError(f"codec {spec!r}, position 0: unknown codec {name!r}; {nearest(name, known)}")
    cls = known[name]
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    position = len(name) + len(colon)
    for item in rest.split(",") if colon else []:
        key, equals, text = item.partition("=")
        if not equals and position == len(name) + 1 and fields:
            key, text = next(iter(fields)), item
        where = f"codec {spec!r}, position {position}"
        if key not in fields:
            hint = nearest(key, fields) if fields else f"{name} takes no parameters"
            raise SpecError(f"{where}: {name} has no parameter {key!r}; {hint}")
        if key in values:
            raise SpecError(f"{where}: {key!r} is given twice")
        try:
            values[key] = _BOOLEANS[text.lower()] if hints[key] is bool else hints[key](text)
        except (KeyError, ValueError):
            raise SpecError(f"{where}: {key} needs {hints[key].__name__}, found {text!r}") from None
        position += len(item) + 1
    try:
        return cls(**values)
    except TypeError:
        missing = [k for k, f in fields.items() if k not in values and f.default is dataclasses.MISSING]
        raise SpecError(f"codec {spec!r}: {name} needs {', '.join(missing)}") from None
    except SpecError as e:
        raise SpecError(f"codec {spec!r}: {e}") from None
