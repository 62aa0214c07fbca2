from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import SpecError
from thinwire.lab.net.rate import format_rate, parse_rate


@pytest.mark.parametrize(
    ("text", "bit_s"),
    [
        ("200mbit", 200_000_000),
        ("1gbit", 1_000_000_000),
        ("2.5gbit", 2_500_000_000),
        ("800kbit", 800_000),
        ("123456bit", 123_456),
        (" 10 Mbit ", 10_000_000),
        ("none", None),
        ("unlimited", None),
    ],
)
def test_parse(text: str, bit_s: int | None) -> None:
    assert parse_rate(text) == bit_s


@pytest.mark.parametrize(
    "text", ["", "fast", "200", "200mb", "-1mbit", "1e3mbit", "0mbit", "1kbit", "101gbit", "nan"]
)
def test_what_does_not_parse_shows_examples(text: str) -> None:
    with pytest.raises(SpecError, match="200mbit"):
        parse_rate(text)


def test_a_number_without_unit_is_refused() -> None:
    with pytest.raises(SpecError, match="unit"):
        parse_rate(200_000_000)  # type: ignore[arg-type]


@given(st.one_of(st.none(), st.integers(100_000, 100 * 10**9)))
def test_format_round_trips(bit_s: int | None) -> None:
    assert parse_rate(format_rate(bit_s)) == bit_s
