"""Link rates as text: ``200mbit``, ``2.5gbit``, ``unlimited``."""

from __future__ import annotations

import re

from ...errors import SpecError

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_UNLIMITED = ("none", "unlimited")
_MIN_BIT_S = 100_000
_MAX_BIT_S = 100 * 10**9
_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE)
_EXAMPLES = "write for example '800kbit', '200mbit', '2.5gbit' or 'unlimited'"


def parse_rate(text: str) -> int | None:
    """The rate in bit/s, None for no limit. Units are decimal: 1 mbit = 10**6 bit/s.

    Raises SpecError for any other text, and for a rate under 100 kbit or over 100 gbit.
    """
    if not isinstance(text, str):
        raise SpecError(f"rate {text!r} is not text with a unit; {_EXAMPLES}")
    if text.strip().lower() in _UNLIMITED:
        return None
    match = _FORM.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise SpecError(f"rate {text!r} does not parse; {_EXAMPLES}")
    bit_s = round(float(match[1]) * _UNITS[match[2].lower()])
    if not _MIN_BIT_S <= bit_s <= _MAX_BIT_S:
        raise SpecError(f"rate {text!r} is {bit_s} bit/s, outside 100kbit .. 100gbit; {_EXAMPLES}")
    return bit_s


def format_rate(bit_s: int | None) -> str:
    """The text that ``parse_rate`` reads back to the same number of bit/s."""
    if bit_s is None:
        return "unlimited"
    for unit in ("gbit", "mbit", "kbit"):
        text = f"{bit_s / _UNITS[unit]:.9f}".rstrip("0").rstrip(".")
        if bit_s >= _UNITS[unit] and round(float(text) * _UNITS[unit]) == bit_s:
            return text + unit
    return f"{bit_s}bit"
