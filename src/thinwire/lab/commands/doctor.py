"""``thinwire doctor``: what this machine can emulate, one line each."""

from __future__ import annotations

import sys

import click

from ..net import doctor as examine


@click.command()
def doctor() -> None:
    """Say what is missing for emulated networks: root, iproute2, kernel modules. Tries each, and cleans up."""
    findings = examine()
    for finding in findings:
        click.echo(str(finding))
    sys.exit(1 if any(not f.ok and f.needed for f in findings) else 0)
