"""``thinwire bench``: measurements that are published as they come out. A file for each command."""

import click

from .codec import codec
from .collective import collective
from .messages import messages


@click.group()
def bench() -> None:
    """Measure codecs, collectives, and the messages of a training run."""


for _command in (codec, collective, messages):
    bench.add_command(_command)
