"""The tables of the page, as HTML. Every value that came from a result is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from . import text
from .figures_link import message_kinds
from .schema import Result
from .style import looks
from .summary import Row, Summary


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], marked: int | None = None, words: int = 1
) -> str:
    """Rows of HTML cells; the first of each is the row's header, ``marked`` the row that stands out, the first
    ``words`` columns hold words, the others numbers. ``head`` is plain text."""

    def kind(column: int) -> str:
        return ' class="words"' if column < words else ""

    top = "".join(f'<th scope="col"{kind(i)}>{escape(cell)}</th>' for i, cell in enumerate(head))
    body = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td{kind(i + 1)}>{cell}</td>" for i, cell in enumerate(row[1:]))
        mark = ' class="main"' if number == marked else ""
        body.append(f'<tr{mark}><th scope="row">{row[0]}</th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def policies(result: Result, summary: Summary) -> str:
    """The comparison: one row per policy, fastest first."""
    fp32, bf16 = summary.fp32, summary.bf16
    head = ["policy", "samples/s"]
    head += ["× bf16 wire"] if bf16 is not None else []
    head += [f"× {fp32.policy} (fp32)"] if fp32 is not None else []
    head += ["% of zero-comm. speed", "wire bytes per step", "raw / wire", "validation loss"]
    head += ["loss − none (nats)", "loss parity, upper 95 % bound"]
    look = looks(result.policies)
    rows = []
    for row in summary.rows:
        name = f'<span class="dot" style="background:{look[row.policy].colour}"></span>{escape(row.policy)}'
        cells = [f"{name}<small>{escape(row.description)}</small>", text.number(row.samples_per_s)]
        for reference in (bf16, fp32):
            if reference is not None:
                cells.append(text.times(row.samples_per_s / reference.samples_per_s))
        cells += [text.percent(row.limit_share), text.nbytes(row.wire_total), text.times(row.ratio)]
        cells += [_loss(row), *_parity(row)]
        rows.append(cells)
    return table(head, rows, marked=summary.rows.index(summary.featured))


def details(summary: Summary) -> str:
    """Steps and counters: what the comparison is computed from."""
    head = [
        "policy", "runs", "median step", "zero-comm. step", "comm share", "speed per rank", "raw bytes per rank",
        "wire bytes per rank", "interface bytes per host",
    ]  # fmt: skip
    rows = [
        [
            escape(row.policy), str(len(row.speeds)), text.milliseconds(row.step_ms),
            text.milliseconds(row.zero_comm_ms),
            text.percent(None if row.limit_share is None else 1 - row.limit_share),
            text.flops(row.tflops_per_rank), text.nbytes(row.raw_total), text.nbytes(row.wire_total),
            text.nbytes(row.interface_bytes),
        ]
        for row in summary.rows
    ]  # fmt: skip
    return table(head, rows)


def messages(result: Result) -> str:
    """The message profile; empty where the result has none."""
    kinds = message_kinds(result)
    total = sum(kind.nbytes for kind in kinds)
    rows = [
        [
            escape(kind.axis), escape(kind.op), escape(kind.role.replace("_", " ")), escape(kind.dtype),
            f"{kind.count:g}", text.nbytes(kind.mean_nbytes), text.nbytes(kind.nbytes),
            text.percent(kind.nbytes / total if total else None), text.milliseconds(1e3 * kind.seconds),
        ]
        for kind in kinds
    ]  # fmt: skip
    head = ["axis", "op", "role", "dtype", "count", "mean size", "raw bytes", "share of bytes", "time"]
    return table(head, rows, words=4) if rows else ""


def calibration(result: Result) -> str:
    """Goodput by message size; empty where the result has none."""
    nominal = result.link.rate_bit_s
    rows = [
        [
            f"{c.nbytes:,} bytes", text.milliseconds(1e3 * c.seconds), text.rate(c.goodput_bit_s),
            text.percent(c.goodput_bit_s / nominal if nominal else None),
        ]
        for c in sorted(result.calibration, key=lambda c: c.nbytes)
    ]  # fmt: skip
    return table(["message size", "time", "goodput", "of the nominal rate"], rows) if rows else ""


def _loss(row: Row) -> str:
    if row.val_loss is None:
        return text.NO_VALUE
    return f"{row.val_loss:.4f}" if row.val_loss == row.val_loss else "diverged"


def _parity(row: Row) -> list[str]:
    parity = row.parity
    if parity is None:
        return [text.NO_VALUE, '<span class="untested">baseline</span>']
    style = {"passes": "passes", "fails": "fails"}.get(parity.verdict, "untested")
    beneath = text.nats(parity.upper_95) if parity.tested else text.seeds(parity.seeds)
    words = f'<span class="{style}">{escape(parity.verdict)}</span><small>{escape(beneath)}</small>'
    return [text.nats(row.loss_difference), words]
