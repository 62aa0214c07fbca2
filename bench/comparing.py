"""What the benchmarks made of ``thinwire compare`` share: their options, and starting it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    out: Path
    draw_only: bool


def read_options(description: str) -> Options:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draw", action="store_true", help="draw the figure of existing results only")
    arguments = parser.parse_args()
    return Options(arguments.out, arguments.draw)


def compare(out: Path, policies: Iterable[str], **options: object) -> None:
    """``thinwire compare`` with ``options`` as its flags; it goes on where an earlier run into ``out`` stopped."""
    command = [str(Path(sys.executable).with_name("thinwire")), "compare", "--policies", ",".join(policies)]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    subprocess.run([*command, "--out", str(out)], check=True)
