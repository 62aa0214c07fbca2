"""The command line of ``thinwire run``: torchrun's, with a few options more."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.run import get_args_parser

from ..errors import SpecError, UnsupportedError, nearest
from ..policy import AXES
from ..presets import load
from .settings import RunSettings

_SCRIPT_FLAGS = ("-m", "--module")


@dataclass(frozen=True)
class Arguments:
    """settings: for the ranks. script, script_args: what they run. torchrun: its parsed arguments. starts_ranks:
    whether an option of torchrun's was given, so that this process is not a rank itself."""

    settings: RunSettings
    script: str
    script_args: list[str]
    torchrun: argparse.Namespace
    starts_ranks: bool


def _axis_of(text: str) -> tuple[str, str]:
    name, equals, axis = text.rpartition("=")
    if not equals or not name or axis not in AXES:
        raise argparse.ArgumentTypeError(f"NAME=AXIS is needed, with an axis of {', '.join(AXES)}")
    return name, axis


def _seconds(text: str) -> float:
    value = float(text)
    if not (0 <= value < math.inf):
        raise argparse.ArgumentTypeError("a number of seconds, 0 or more")
    return value


def _lanes(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("a number of lanes, 1 or more")
    return value


def _parser() -> tuple[argparse.ArgumentParser, set[str]]:
    """The parser, and the options in it that are thinwire's own."""
    parser = get_args_parser()
    parser.prog = "thinwire run"
    parser.description = (
        "Run a PyTorch script under compression, unchanged. Takes torchrun's options; without any, in a process that "
        "torchrun, srun or mpirun has started as one of several ranks, it is that rank. With MASTER_ADDR set, "
        "srun thinwire run --policy balanced train.py is all that a Slurm job needs."
    )
    parser.allow_abbrev = False  # an option's beginning would hide whose it is
    own = parser.add_argument_group("thinwire")
    actions = [
        own.add_argument("--policy", default="balanced", metavar="POLICY",
                         help="A preset (none, bf16, lossless, balanced, ...), or a TOML file. Default: balanced."),
        own.add_argument("--axis", action="append", default=[], type=_axis_of, metavar="NAME=AXIS",
                         help="The axis (dp, tp, pp, zero, ep, cp) of groups of a mesh dimension, or of a description given "
                         "to new_group. May be repeated. Groups without either are dp."),
        own.add_argument("--require-feedback", action="store_true",
                         help="Stop at a lossy reduction without the error feedback that the policy asks for. Default: send "
                         "it, and say so in the table."),
        own.add_argument("--lanes", type=_lanes, metavar="N",
                         help="Compressed collectives of a group that are under way at once. Default: 2 over gloo, 1 over "
                         "nccl."),
        own.add_argument("--log", metavar="FILE.jsonl",
                         help="Write what each rank has sent to FILE.rankN.jsonl, one line at the end."),
        own.add_argument("--log-every", type=_seconds, default=0.0, metavar="SECONDS",
                         help="And one line every so often."),
    ]  # fmt: skip
    return parser, {option for action in actions for option in action.option_strings}


def parse(argv: Sequence[str]) -> Arguments:
    """Read a command line, and check all that can be before ranks are started.

    Raises SpecError for an unknown policy, UnsupportedError for a script that does not exist, or for a torchrun option that
    cannot be; argparse ends the process for the rest.
    """
    parser, own = _parser()
    parsed: Any = parser.parse_args(list(argv))
    if parsed.no_python or parsed.run_path:
        raise UnsupportedError(
            "--no-python and --run-path cannot be under thinwire run: it runs the script inside its own Python"
        )
    if parsed.log_every and parsed.log is None:
        raise SpecError("--log-every needs --log FILE.jsonl")
    load(parsed.policy)
    if not parsed.module and not Path(parsed.training_script).is_file():
        raise UnsupportedError(
            f"script {parsed.training_script} does not exist{_hint(parsed.training_script)}"
        )
    head = argv[: len(argv) - len(parsed.training_script_args) - 1]
    flags = {word.split("=")[0] for word in head if word.startswith("-")}
    return Arguments(
        settings=RunSettings(
            policy=parsed.policy,
            axes=dict(parsed.axis),
            require_feedback=parsed.require_feedback,
            lanes=parsed.lanes,
            log=parsed.log,
            log_every=parsed.log_every,
            module=parsed.module,
        ),
        script=parsed.training_script,
        script_args=list(parsed.training_script_args),
        torchrun=parsed,
        starts_ranks=bool(flags - own - set(_SCRIPT_FLAGS) - {"--"}),
    )


def _hint(script: str) -> str:
    path = Path(script)
    scripts = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    return f"; {nearest(path.name, scripts)}" if scripts else ""
