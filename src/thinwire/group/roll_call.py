"""After a call of a group has failed: what every rank saw of it, told through the store."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed import Store  # type: ignore[attr-defined]

_PATIENCE_S = 5.0
_STORE_S = 1.0  # for what the store itself takes
_PAUSE_S = 0.02


class RollCall:
    """Each rank of a group reports its first failure, and hears what the others report.

    Ranks that do not report within five seconds are lost, or elsewhere in the program.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._account: str | None = None
        self._reported = False
        self._lock = threading.Lock()  # sends, receives and collectives fail in threads of their own

    def report(self, what: str) -> None:
        """Tell the others what this rank saw, without waiting for them. Only the first report counts."""
        self._start(what).join(_STORE_S)

    def account(self, what: str, axis: str) -> str:
        """Report, wait for the others, and say in words who is missing and what they report. Once; then the same."""
        with self._lock:
            if self._account is None:
                found: list[str] = []
                asking = self._start(what, found, axis)
                # A store whose keeper stands still, or behind a link that is cut, does not even time out.
                asking.join(_PATIENCE_S + _STORE_S)
                self._account = (
                    found[0]
                    if found
                    else "The store does not answer either: the rank that keeps it is lost, or the link to it."
                )
            return self._account

    def _start(self, what: str, found: list[str] | None = None, axis: str = "") -> threading.Thread:
        def run() -> None:
            # Any error means that the store is gone; there is nobody to tell.
            with suppress(Exception):
                if not self._reported:
                    self._reported = True
                    self._store.set(f"failed/{self._rank}", what)
                if found is not None:
                    found.append(self._ask(axis))

        thread = threading.Thread(target=run, daemon=True, name="thinwire-roll-call")
        thread.start()
        return thread

    def _ask(self, axis: str) -> str:
        doing: dict[str, list[int]] = defaultdict(list)
        missing = list(range(self._size))
        end = time.monotonic() + _PATIENCE_S
        while missing and time.monotonic() < end:
            # Looked at and not waited for: a wait locks the store for all groups of this process.
            for rank in list(missing):
                if self._store.check([f"failed/{rank}"]):
                    doing[self._store.get(f"failed/{rank}").decode()].append(rank)
                    missing.remove(rank)
            time.sleep(_PAUSE_S)
        if missing:
            first = (
                f"Within {_PATIENCE_S:g} s rank(s) {_listed(missing)} of the {self._size} of this group (axis {axis}) "
                "did not report a failure: lost, or elsewhere in the program. The others failed in"
            )
        else:
            first = f"All {self._size} ranks report a failure, none is lost. They failed in"
        return "\n".join(
            [first, *(f"  rank(s) {_listed(sorted(ranks))}: {text}" for text, ranks in doing.items())]
        )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
