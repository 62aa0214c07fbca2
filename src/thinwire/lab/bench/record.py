"""What every result carries: the environment and the command it came from; and how it is written.

Nothing here names a host, a user or a folder.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "numba", "numpy")


def environment() -> dict[str, Any]:
    """Date, versions, hardware and source revision of this process.

    Keys: ``date`` (UTC, ISO 8601), ``python``, ``torch``, ``numba``, ``numpy``, ``thinwire`` (versions; None:
    not installed), ``cpu``, ``cores`` (those this process may use), ``memory_bytes``, ``os``, ``git_commit``
    and ``git_dirty`` (None outside a checkout).
    """
    commit, dirty = _revision()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "thinwire": _version("thinwire"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "os": _os_name(),
        "git_commit": commit,
        "git_dirty": dirty,
    }


def command_line() -> str:
    """The command of this process as one would type it: its arguments, without the interpreter's folder."""
    return _command(sys.orig_argv, sys.argv)


def write_json(path: str | os.PathLike[str], obj: Any) -> None:
    """Write ``obj`` to ``path`` as JSON, all of it or nothing: a reader never sees half a file.

    Floats that are not finite become the strings "nan", "inf" and "-inf", which standard JSON can hold.
    Raises TypeError for what JSON cannot hold, OSError where the folder cannot be written.
    """
    path = Path(path)
    text = json.dumps(_finite(obj), indent=1, allow_nan=False) + "\n"
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


def _finite(obj: Any) -> Any:
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else str(obj)
    if isinstance(obj, Mapping):
        return {key: _finite(value) for key, value in obj.items()}
    if isinstance(obj, Sequence) and not isinstance(obj, str | bytes):
        return [_finite(value) for value in obj]
    return obj


def _command(full: Sequence[str], argv: Sequence[str]) -> str:
    arguments = list(argv[1:])
    before = list(full[1 : len(full) - len(arguments)])  # the interpreter's own options and the program
    if "-m" in before:
        program = ["python", "-m", before[before.index("-m") + 1]]
    elif not argv or argv[0] in ("", "-c", "-"):
        program = ["python", *before]
    elif argv[0].endswith(".py"):
        program = ["python", _relative(argv[0])]
    else:
        program = [os.path.basename(argv[0])]
    return shlex.join(program + arguments)


def _relative(path: str) -> str:
    found = os.path.relpath(path)
    return os.path.basename(path) if found.startswith("..") else found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _os_name() -> str:
    kernel = f"{platform.system()} {platform.release()}"
    with suppress(OSError):
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']} ({kernel})"
    return kernel


def _revision() -> tuple[str | None, bool | None]:
    """(commit, dirty) of the checkout this file is tracked in; an installed copy is in none."""
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None, None
    commit = _git(here.parent, "rev-parse", "HEAD")
    changes = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
