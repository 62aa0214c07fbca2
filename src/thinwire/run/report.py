"""What a rank says: which groups get which codec when they are made; what was sent at the end, and when asked (SIGUSR1).

Plain text on stderr, so that a rank needs no more than the library does, and the script's own output stays as it is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType

from ..codecs import parse_compressor
from ..collectives.traffic import Message, Traffic
from ..group import MessageStats, Stats, StatsLog, ThinwireGroup
from ..policy import AxisPolicy, ByDtype, Policy
from .settings import RunSettings

_REDUCTIONS = ("all_reduce", "reduce_scatter")
_WITHOUT = "WITHOUT error feedback"
_HEAD = (
    "axis", "op", "codec", "role", "calls", "raw MB", "wire MB", "ratio", "encode s", "wire s", "decode s", "",
)  # fmt: skip
_TEXTS = 4  # the first columns of the table are words, the others numbers, but for the note at the end


@lru_cache
def _lossless(codec: str) -> bool:
    return parse_compressor(codec).lossless


def wants_feedback(policy: AxisPolicy, message: Message | MessageStats) -> bool:
    """Whether the policy asks for error feedback for this compressed message: it is a reduction, and lossy."""
    return policy.feedback and message.op in _REDUCTIONS and not _lossless(message.codec)


def has_feedback(message: Message | MessageStats) -> bool:
    """Under ``thinwire run`` only DistributedDataParallel's gradients, with thinwire's hook, are marked as gradients."""
    return message.role == "gradient"


class Report:
    """Speaks for one rank: rank 0 at the start and at the end, all of them into the log. A context: the script's run."""

    def __init__(self, settings: RunSettings, policy: Policy, rank: int) -> None:
        self.settings = settings
        self._policy = policy
        self._rank = rank
        self._traffics: list[Traffic] = []  # held: scripts destroy their groups before they end
        self._said: set[str] = set()
        self._log: StatsLog | None = None
        self._log_every = settings.log_every
        self._ended = threading.Event()

    # What gets which codec.

    def group(self, group: ThinwireGroup) -> None:
        """A group has been made."""
        if not any(traffic is group.traffic for traffic in self._traffics):
            self._traffics.append(group.traffic)
        axis = group.axis()
        head = f"group {group.getGroupDesc()}: axis {axis}, {group.size()} ranks over {group.options.backend}"
        self._say([f"policy {self._policy.name}, {head}", *axis_lines(self._policy.axis(axis))])

    def ddp(self, group: ThinwireGroup, numel: int) -> None:
        """The hook of a DistributedDataParallel of ``numel`` trained parameters has been registered."""
        axis = group.axis("all_reduce")
        feedback = self._policy.axis(axis).feedback
        # Residuals and, for steps that are skipped, a copy.
        memory = (
            f"with error feedback, up to {8 * numel / 1e6:.1f} MB a rank"
            if feedback
            else "no error feedback asked for"
        )
        self._say([f"DistributedDataParallel over axis {axis}, {group.size()} ranks: {memory}"])

    def own_hook(self, group: ThinwireGroup, name: str) -> None:
        """A DistributedDataParallel has a hook of the script's."""
        axis = group.axis("all_reduce")
        without = f", {_WITHOUT}" if self._policy.axis(axis).feedback else ""
        self._say(
            [
                f"DistributedDataParallel keeps the script's hook {name}: what that sends goes over axis {axis}{without}"
            ]
        )

    def _say(self, lines: Sequence[str]) -> None:
        text = "\n  ".join(lines)
        if self._rank == 0 and text not in self._said:
            self._said.add(text)
            _write(f"thinwire: {text}\n")

    # What was sent.

    def stats(self) -> Stats:
        """Sums over all groups that the script has made, those that it has destroyed included."""
        return Stats.of(list(self._traffics))

    def text(self) -> str:
        """The table of what this rank has sent."""
        title = f"thinwire: rank {self._rank} sent under policy {self._policy.name}"
        messages = self.stats().messages
        if not messages:
            return f"{title}: nothing; the script has used no group\n"
        monitored = any(message.sampled for message in messages)
        rows = [self._row(message, monitored) for message in messages]
        compressed = Stats(tuple(m for m in messages if m.compressed))
        passed = Stats(tuple(m for m in messages if not m.compressed))
        for name, part in (("compressed", compressed), ("passed through", passed), ("all", Stats(messages))):
            for total in part.by().values():
                rows.append([name, "", "", "", *_numbers(total), *([""] if monitored else []), ""])
        note = "  encode, decode: CPU seconds; wire: seconds of waiting, which overlap with computing\n"
        if shared := sum(message.memory_bytes for message in messages):
            note += (
                f"  {shared / 1e6:.2f} MB more went through memory that ranks of a host share, uncompressed\n"
            )
        head = list(_HEAD)
        if monitored:
            head.insert(-1, "error")
            note += "  error: largest relative L2 error of sampled messages, over all ranks\n"
        return f"{title}\n{_aligned([head, *rows])}{note}"

    def _row(self, message: MessageStats, monitored: bool) -> list[str]:
        error = message.max_relative_error
        shown = "" if error is None else f"{error:.4f}"
        return [*_words(message), *_numbers(message), *([shown] if monitored else []), self._note(message)]

    def _note(self, message: MessageStats) -> str:
        if not message.compressed or not wants_feedback(self._policy.axis(message.axis), message):
            return ""
        return "error feedback" if has_feedback(message) else _WITHOUT

    def print_later(self) -> None:
        """Print the table from another thread: a signal's handler may have interrupted one that holds a counter's lock."""
        threading.Thread(target=lambda: _write(self.text())).start()

    def __enter__(self) -> Report:
        if self.settings.log is not None:
            self._log = StatsLog(
                self.settings.log, rank=self._rank, source=self.stats, policy=self._policy.name
            )
            if self._log_every:
                threading.Thread(target=self._keep_log, daemon=True, name="thinwire-log").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._write_log()
        if self._rank == 0:
            _write(self.text())

    def _keep_log(self) -> None:
        while not self._ended.wait(self._log_every):
            self._write_log()

    def _write_log(self) -> None:
        if self._log is not None:
            self._log.log()


def axis_lines(policy: AxisPolicy) -> list[str]:
    """What an axis does with the ops, one line for each codec."""
    ops: dict[tuple[str, str], list[str]] = {}
    for role, table in {"": policy.codecs, **policy.roles}.items():
        for op, codecs in table.items():
            if codecs != ByDtype():
                ops.setdefault((str(codecs), role), []).append(op)
    lines = []
    for (codec, role), names in ops.items():
        text = f"{', '.join(names)}{f' of role {role}' if role else ''}: {codec}"
        reduces = any(name in _REDUCTIONS for name in names)
        if policy.feedback and reduces:
            text += f", error feedback under DistributedDataParallel, else {_WITHOUT}"
        lines.append(text)
    if not lines:
        return ["everything passes through"]
    if policy.monitor is not None:
        lines.append(f"error monitor: {policy.monitor}")
    return [*lines, f"other ops, other dtypes and messages under {policy.min_nbytes} bytes pass through"]


def _words(message: MessageStats) -> list[str]:
    return [message.axis, message.op, message.codec, message.role]


def _numbers(message: MessageStats) -> list[str]:
    return [
        str(message.calls),
        f"{message.raw_bytes / 1e6:.2f}",
        f"{message.wire_bytes / 1e6:.2f}",
        f"{message.ratio:.2f}",
        *(f"{seconds:.2f}" for seconds in (message.encode_s, message.wire_s, message.decode_s)),
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def cell(index: int, text: str) -> str:
        words = index < _TEXTS or index == len(widths) - 1
        return text.ljust(widths[index]) if words else text.rjust(widths[index])

    lines = ("  ".join(cell(i, text) for i, text in enumerate(row)).rstrip() for row in rows)
    return "".join(f"  {line}\n" for line in lines)


def _write(text: str) -> None:
    # In one piece: the ranks share a terminal.
    sys.stderr.write(text)
    sys.stderr.flush()
