"""``thinwire bench``: measurements that are published as they come out. A file for each command."""

import click

from .codec import codec
from .collective import collective
from .messages import messages
from .wide import wide


@click.group()
def bench() -> None:
    """Measure codecs, collectives, the messages of a training run, and many ranks."""


for _command in (codec, collective, messages, wide):
    bench.add_command(_command)
