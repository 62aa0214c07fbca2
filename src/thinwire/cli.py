"""The ``thinwire`` command."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from .errors import RankError, ThinwireError


def main() -> None:
    """Entry point. A ThinwireError becomes one message and exit status 1, without a traceback."""
    if sys.argv[1:2] == ["run"]:
        _run(sys.argv[2:])
    try:
        from .lab.commands import command
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("thinwire"):
            raise
        sys.exit(f'thinwire: the command needs {e.name}; install it with: pip install "thinwire[lab]"')
    try:
        command(standalone_mode=False)
    except ThinwireError as e:
        sys.exit(f"thinwire: {_tail(str(e)) if isinstance(e, RankError) else e}")
    except Exception as e:
        sys.exit(_click_exit(e))


def _run(arguments: list[str]) -> NoReturn:
    """``thinwire run`` without the lab: where jobs run, its packages need not be."""
    from .run.command import main as run

    try:
        status = run(arguments)
    except ThinwireError as e:
        # From before the script runs; its own errors have their tracebacks.
        sys.exit(f"thinwire: {e}")
    sys.exit(status)


def _tail(text: str, lines: int = 30) -> str:
    """One screen: the first lines say what failed, the last ones of the traceback say where."""
    rows = text.splitlines()
    return text if len(rows) <= lines else "\n".join([*rows[:3], "  ...", *rows[-(lines - 4) :]])


def _click_exit(error: Exception) -> Any:
    import click

    if isinstance(error, click.Abort):
        return "thinwire: interrupted; all ranks were stopped and the emulated network was removed"
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    raise error


if __name__ == "__main__":
    main()
