"""Sizes as values of options."""

from __future__ import annotations

import click

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}


def size(text: str) -> int:
    """Bytes, from 64KiB or 16MiB. For ``type`` of an option: raises BadParameter."""
    for unit, factor in _UNITS.items():
        number = text.removesuffix(unit)
        if number != text and number.isdigit() and int(number) > 0:
            return int(number) * factor
    raise click.BadParameter(f"{text!r} is not a size such as 64KiB or 16MiB")
