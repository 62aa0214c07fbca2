"""One rank: ``python -m thinwire.run.rank SETTINGS script.py args...``. Patches PyTorch, then is the script."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence

from ..group import register
from ..presets import load
from .patches import BACKEND, Compression, LaunchedGroup
from .report import Report
from .settings import RunSettings


def run_script(settings: RunSettings, script: str, args: Sequence[str]) -> None:
    """Run a script as ``__main__`` with its groups compressed; what it raises, SystemExit included, is passed on."""
    register(BACKEND, LaunchedGroup)
    policy = load(settings.policy)
    report = Report(settings, policy, int(os.environ.get("RANK", "0")))
    Compression(settings, policy, report).install()
    signal.signal(signal.SIGUSR1, lambda *_: report.print_later())
    sys.argv = [script, *args]
    if not sys.flags.safe_path:
        # What Python itself puts there; now it is the folder of thinwire's command.
        sys.path[0] = os.getcwd() if settings.module else os.path.dirname(os.path.abspath(script))
    with report:
        if settings.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run_script(RunSettings.from_json(sys.argv[1]), sys.argv[2], sys.argv[3:])
