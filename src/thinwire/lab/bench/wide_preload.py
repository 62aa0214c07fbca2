"""Imported by the process that the ranks of ``thinwire bench wide`` are forked from: they share its code and its kernels."""

import torch

from ...codecs import warm_up
from . import wide  # noqa: F401

torch.set_num_threads(1)  # threads do not survive a fork
warm_up()
