"""Which codecs there are: ours, and those of other packages, which come through entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from ..errors import SpecError
from .base import Codec

_CODECS: dict[str, type[Codec]] = {}
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
