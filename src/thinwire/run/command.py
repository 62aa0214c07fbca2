"""``thinwire run``: start ranks through torchrun, or be one."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, cast

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..errors import ThinwireError
from .arguments import Arguments, parse
from .environment import rank_variables


def main(argv: Sequence[str]) -> int:
    """Run ``thinwire run ARGV`` and return the exit status, the script's own if it has failed.

    Raises ThinwireError for what is wrong before anything has been started.
    """
    arguments = parse(argv)
    if not arguments.starts_ranks:
        variables = rank_variables(os.environ)
        if variables is not None:
            # Not imported above: torchrun's agent has no use for what a rank needs.
            from .rank import run_script

            os.environ.update(variables)
            try:
                run_script(arguments.settings, arguments.script, arguments.script_args)
            except ThinwireError:
                # As the script's other errors end it: with a traceback, which the command's own do without.
                traceback.print_exc()
                return 1
            return 0
    return _start_ranks(arguments)


def _start_ranks(arguments: Arguments) -> int:
    options = arguments.torchrun
    options.module = True
    options.training_script = "thinwire.run.rank"
    options.training_script_args = [
        arguments.settings.to_json(),
        arguments.script,
        *arguments.script_args,
    ]
    try:
        cast(Any, torchrun).run(options)
    except ChildFailedError as e:
        # The ranks have printed their own tracebacks; this says which of them was first.
        print(e, file=sys.stderr)
        status = e.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status  # ended by a signal: as a shell says it
    return 0
