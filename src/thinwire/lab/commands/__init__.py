"""The commands behind ``thinwire``: one file each."""

import click

from .bench import bench
from .codecs import codecs
from .compare import compare
from .doctor import doctor
from .run import run
from .train import train


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="thinwire")
def command() -> None:
    """Distributed training that sends fewer bytes.

    Start with `thinwire compare --quick --out out`, which trains a small GPT on an emulated network under
    several compression policies and writes one page that shows what each of them buys.
    """


for _sub in (run, train, compare, codecs, bench, doctor):
    command.add_command(_sub)

__all__ = ["command"]
