"""Numbers and verdicts as words: the same everywhere in a report."""

from __future__ import annotations

import math

from .schema import MINIMUM_SEEDS, Link, Parity, Result
from .summary import Row, Summary

NO_VALUE = "–"
_SAME = 0.02  # speeds within 2 % are called equal: medians of one machine do not resolve less


def nbytes(value: float | None) -> str:
    """Bytes with a decimal unit, as networks count: 3.42 MB."""
    if value is None:
        return NO_VALUE
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{significant(value / size)} {unit}"
    return f"{value:.0f} B"


def binary(size: int) -> str:
    """Bytes with a binary unit, as the sizes of messages are chosen: 64 KiB."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:g} {unit}" if size % scale == 0 else f"{size / scale:.1f} {unit}"
    return f"{size} B"


def significant(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits and no exponent: 0.0312, 3.12, 312, 31200."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(places, 0)}f}"


def number(value: float | None, digits: int = 3) -> str:
    return NO_VALUE if value is None else significant(value, digits)


def milliseconds(value: float | None) -> str:
    return NO_VALUE if value is None else f"{significant(value)} ms"


def times(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.2f}×"


def percent(value: float | None) -> str:
    return NO_VALUE if value is None else f"{100 * value:.0f} %"


def nats(value: float | None) -> str:
    """A difference of losses, signed: +0.0021."""
    if value is None:
        return NO_VALUE
    if not math.isfinite(value):
        return "diverged"
    if value == 0:
        return "0"
    return f"{value:+.4f}".replace("-", "−")


def rate(bit_s: float | None) -> str:
    if bit_s is None:
        return "not limited"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bit_s >= size:
            return f"{bit_s / size:.4g} {unit}"
    return f"{bit_s:g} bit/s"


def flops(tera: float | None) -> str:
    """FLOP/s from TFLOP/s, with the unit that suits it."""
    if tera is None:
        return NO_VALUE
    return f"{significant(tera)} TFLOP/s" if tera >= 1 else f"{significant(1e3 * tera)} GFLOP/s"


def seeds(n: int) -> str:
    return f"{n} seed" if n == 1 else f"{n} seeds"


def emulation(link: Link) -> str:
    """How the link came about, in a few words; always beside the speeds."""
    if link.emulation == "netns":
        return f"emulated network, {rate(link.rate_bit_s)} per host"
    if link.emulation == "paced":
        return f"paced transport, {rate(link.rate_bit_s)}"
    return "no network emulation"


def emulation_note(link: Link) -> str:
    """What the speeds of a report on this link are worth, in a sentence or two."""
    if link.emulation == "netns":
        latency = (
            f"{significant(1e3 * link.latency_s)} ms added latency" if link.latency_s else "bandwidth only"
        )
        return (
            f"Hosts are network namespaces on one machine, joined by shaped links: {rate(link.rate_bit_s)} in "
            f"each direction, {latency}."
        )
    if link.emulation == "paced":
        return (
            f"Paced transport: no network was emulated. The transport itself delays each message as a "
            f"{rate(link.rate_bit_s)} link would; contention, headers and the kernel's network stack are not part "
            "of these speeds."
        )
    return "No emulation: all ranks talk over this machine as it is. The speeds say nothing about a slower network."


def layout(result: Result) -> str:
    """dp 2 × tp 2 × pp 2, ZeRO-1."""
    parts = [f"{axis} {n}" for axis, n in result.layout.items() if axis != "zero"]
    zero = result.layout.get("zero")
    under = f", ZeRO-{zero}" if zero else ", DDP" if (result.plan or {}).get("ddp") else ""
    return " × ".join(parts) + under


def verdict(parity: Parity | None) -> str:
    """ "passes", "fails" or "not tested (3 seeds)"."""
    if parity is None:
        return "not tested"
    if not parity.tested:
        return f"not tested ({seeds(parity.seeds)})"
    return parity.verdict


def headline(summary: Summary) -> str:
    """What the result shows for its main policy, with no more than it supports. Names stand in backquotes."""
    row = summary.featured
    speed = _speed(row, summary)
    if row.limit_share is not None:
        speed += f" and reaches {percent(row.limit_share)} of the zero-communication limit"
    return f"{speed}{_loss(row)}"


def _speed(row: Row, summary: Summary) -> str:
    if summary.bf16 is not None and summary.bf16 is not row:
        reference, words = summary.bf16, "a bf16 wire"
    elif summary.fp32 is not None and summary.fp32 is not row:
        reference, words = summary.fp32, "an uncompressed fp32 wire"
    else:
        return f"`{row.policy}` trains {significant(row.samples_per_s)} samples per second"
    gain = row.samples_per_s / reference.samples_per_s
    if gain > 1 + _SAME:
        return f"`{row.policy}` trains {gain:.2f}× as many samples per second as {words}"
    if gain >= 1 - _SAME:
        return f"`{row.policy}` is no faster than {words} here ({gain:.2f}×)"
    return f"`{row.policy}` is slower than {words} here: {gain:.2f}× its samples per second"


def _loss(row: Row) -> str:
    parity = row.parity
    if parity is None:
        return ""
    if not parity.tested:
        tested = f" ({seeds(parity.seeds)}; {MINIMUM_SEEDS} are needed)" if parity.seeds else ""
        return f"; loss parity not tested{tested}"
    bound = f"upper 95 % bound {nats(parity.upper_95)} nats"
    if parity.passes:
        return f", at no measurable loss ({bound}, {seeds(parity.seeds)})"
    if parity.upper_95 is not None and not math.isfinite(parity.upper_95):
        return ", but its training diverged"
    return f", but not at loss parity ({bound}, limit {nats(parity.limit)}, {seeds(parity.seeds)})"
