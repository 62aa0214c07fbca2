"""``thinwire run`` in the list of commands; :mod:`thinwire.run` is the command, with a parser of its own (torchrun's)."""

from __future__ import annotations

import sys

import click

from ...run.command import main


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    },
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS] script.py [ARGS]...")
def run(arguments: tuple[str, ...]) -> None:
    """Run a PyTorch script under compression, unchanged, with torchrun's options."""
    sys.exit(main(arguments))
