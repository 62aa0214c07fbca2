"""One HTML page that holds everything: text, tables, figures, style. It loads nothing from elsewhere."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape

from . import tables, text
from .css import CSS
from .figures import Drawn
from .schema import LIMIT_NATS, MINIMUM_SEEDS, Result
from .summary import Summary

TERMS = (
    ("policy", "Which codec each message gets, by axis, operation, role and dtype."),
    (
        "raw bytes",
        "What the uncompressed operation would have sent, per rank and step.",
    ),
    (
        "wire bytes",
        "What was sent, per rank and step, counted at the transport call: headers, scales and indices included. The "
        "network's own headers are not; they are in the interface bytes.",
    ),
    (
        "zero-communication step",
        "The step of the same program and schedule with each payload replaced by a one-byte token. Dependencies, "
        "pipeline bubbles and stragglers stay, only the bytes go: no compression can be faster.",
    ),
    ("comm share", "1 − zero-communication step / step: the part of a step that compression can reduce."),
    (
        "% of zero-communication speed",
        "Zero-communication step / step, which is 1 − comm share.",
    ),
    (
        "none, bf16 wire",
        "The two baselines: the same collectives with uncompressed messages, and with messages cast to bf16. plain: "
        "PyTorch without thinwire; after the colon, its own hook.",
    ),
    (
        "loss parity",
        f"A paired test: the same seeds and data with and without the policy, at least {MINIMUM_SEEDS} seeds. It passes "
        f"where the upper 95 % confidence bound (one-sided, Student's t) of the mean difference in validation loss is "
        f"at most {LIMIT_NATS:g} nats. With fewer seeds it is not tested, whatever the difference.",
    ),
    (
        "compute, wait; encode, wire, decode",
        "Mean milliseconds per step and rank. Compute and wait are the main thread's. Encode, wire and decode are the "
        "worker thread's; they may overlap with compute and do not add up to the step.",
    ),
    ("axes", "dp: data, tp: tensor, pp: pipeline parallel; zero: sharded optimizer state; ep: expert, cp: context."),
)  # fmt: skip

_MOST_PER_SENTENCE = 3


def render(result: Result, summary: Summary, figures: Sequence[Drawn]) -> str:
    """The page as HTML text."""
    headline = text.headline(summary)
    body = [
        f'<p class="kicker">thinwire · {escape(_kicker(result))}</p>',
        f"<h1>{_marked(headline)}</h1>",
        *_notes(result, summary),
        _cards(summary),
        "<h2>Policies compared</h2>",
        tables.policies(result, summary),
        f'<p class="small">{_table_note(result, summary)}</p>',
        "<h2>Figures</h2>",
        *(_figure(drawn) for drawn in figures),
        *_section("Messages of an uncompressed step", tables.messages(result),
                  "Per rank and step, largest first; time is the sum over the calls and may overlap with compute."),
        *_section("Calibration of the link", tables.calibration(result), ""),
        *_section("Steps and counters", tables.details(summary), "Medians over runs for times, means for bytes."),
        "<h2>Setup</h2>",
        _list(_setup(result)),
        "<h2>Command</h2>",
        f"<pre><code>{escape(result.command)}</code></pre>",
        "<h2>Terms</h2>",
        _list(TERMS, "terms"),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(headline.replace('`', ''))}</title><style>{CSS}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _marked(words: str) -> str:
    """Escaped text, with `names` in backquotes as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(words))


def _kicker(result: Result) -> str:
    date = str(result.environment.get("date", "")).partition("T")[0]
    hosts = "1 host" if result.hosts == 1 else f"{result.hosts} hosts"
    parts = [f"{result.ranks} ranks on {hosts}", text.layout(result), text.emulation(result.link), date]
    return " · ".join(part for part in parts if part)


def _notes(result: Result, summary: Summary) -> list[str]:
    link = result.link
    style = "note" if link.emulation == "netns" else "note warn"
    notes = [f'<p class="{style}"><strong>The network.</strong> {escape(text.emulation_note(link))}</p>']
    untested = [r.policy for r in summary.rows if r.parity is not None and not r.parity.tested]
    if untested:
        notes.append(
            f'<p class="note warn"><strong>Loss parity not tested</strong> for {_names(untested)}: the test needs '
            f"{MINIMUM_SEEDS} seeds with a baseline. Speeds and bytes are not affected.</p>"
        )
    failing = [r.policy for r in summary.rows if r.parity is not None and r.parity.verdict == "fails"]
    if failing:
        notes.append(
            f'<p class="note warn"><strong>Loss parity fails</strong> for {_names(failing)}: '
            "their speed is bought with loss.</p>"
        )
    return notes


def _names(policies: Sequence[str]) -> str:
    if len(policies) > 2 * _MOST_PER_SENTENCE:
        return f"{len(policies)} of the policies (see the table)"
    marked = [f"<code>{escape(policy)}</code>" for policy in policies]
    return marked[0] if len(marked) == 1 else f"{', '.join(marked[:-1])} and {marked[-1]}"


def _cards(summary: Summary) -> str:
    """The main policy's figures, large."""
    row = summary.featured
    cards = []
    for reference, words in ((summary.bf16, "a bf16 wire"), (summary.fp32, "an uncompressed fp32 wire")):
        if reference is not None and reference is not row:
            cards.append((text.times(row.samples_per_s / reference.samples_per_s), f"the speed of {words}"))
    if not cards:
        cards.append((text.number(row.samples_per_s), "samples per second"))
    if row.limit_share is not None:
        cards.append((text.percent(row.limit_share), "of the zero-communication speed"))
    if row.ratio is not None:
        cards.append((text.times(row.ratio), f"fewer bytes: {text.nbytes(row.wire_total)} per rank and step"))
    if row.parity is not None:
        if row.parity.tested:
            words = f"nats, upper bound of the loss difference: parity {row.parity.verdict}"
            cards.append((text.nats(row.parity.upper_95), words))
        else:
            cards.append(("not tested", f"loss parity: {text.seeds(row.parity.seeds)} of {MINIMUM_SEEDS}"))
    inner = "".join(f'<div class="card"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in cards)
    return f'<p class="small">For <code>{escape(row.policy)}</code>:</p><div class="cards">{inner}</div>'


def _table_note(result: Result, summary: Summary) -> str:
    note = (
        "Fastest first. Speeds are medians over the runs, bytes are per rank and step. Validation losses are means "
        "over the policy's own seeds; compare policies by the paired difference."
    )
    counts = {row.seeds for row in summary.rows}
    if len(counts) > 1:
        note += " Policies differ in the number of seeds: " + ", ".join(
            f"{escape(row.policy)} {row.seeds}" for row in summary.rows
        )
        note += "."
    return note


def _figure(drawn: Drawn) -> str:
    data = base64.b64encode(drawn.svg).decode("ascii")
    caption = escape(drawn.caption)
    return (
        f'<figure id="{escape(drawn.name)}"><div class="frame" tabindex="0">'
        f'<img alt="{caption}" src="data:image/svg+xml;base64,{data}"></div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _section(title: str, content: str, note: str) -> list[str]:
    if not content:
        return []
    return [f"<h2>{escape(title)}</h2>", *([f'<p class="small">{escape(note)}</p>'] if note else []), content]


def _list(entries: Sequence[tuple[str, str]], kind: str = "facts") -> str:
    inner = "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in entries)
    return f'<dl class="{kind}">{inner}</dl>'


def _setup(result: Result) -> list[tuple[str, str]]:
    env, model, link = result.environment, result.model, result.link
    memory = env.get("memory_bytes")
    commit = env.get("git_commit")
    shape = [
        f"{value:,} {name}" if name in ("layers", "heads") else f"{name} {value:,}"
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary")
        if (value := getattr(model, name)) is not None
    ]
    batch = f"{model.batch} samples per step" if model.batch is not None else ""
    if batch and model.micro_batches is not None:
        batch += f", {model.micro_batches} micro-batches"
    latency = f"{1e3 * link.latency_s:g} ms added" if link.latency_s else "none added"
    steps = sorted({run.steps for run in result.runs})
    entries = [
        ("link", f"{link.spec} – {text.emulation(link)}"),
        ("latency", latency),
        ("link note", link.note),
        ("ranks and layout", f"{result.ranks} ranks on {result.hosts} host(s): {text.layout(result)}"),
        ("model", f"{model.preset}, {model.parameters:,} parameters: {', '.join(shape)}; {model.precision}"),
        ("batch", batch),
        ("steps per run", ", ".join(map(str, steps))),
        ("processor", f"{env.get('cpu', 'unknown')}, {env.get('cores', '?')} cores"),
        ("memory", f"{memory / 2**30:.1f} GiB" if isinstance(memory, int | float) else ""),
        ("system", str(env.get("os") or "")),
        ("versions", ", ".join(f"{k} {env[k]}" for k in ("python", "torch", "numba", "numpy") if env.get(k))),
        (
            "revision",
            f"{commit}{' with uncommitted changes' if env.get('git_dirty') else ''}" if commit else "",
        ),
        ("date", str(env.get("date") or "")),
    ]
    known = {
        "cpu",
        "cores",
        "memory_bytes",
        "os",
        "python",
        "torch",
        "numba",
        "numpy",
        "git_commit",
        "git_dirty",
        "date",
    }
    entries += [
        (key.replace("_", " "), str(value)) for key, value in env.items() if key not in known and value
    ]
    return [(name, value) for name, value in entries if value]
