"""Tensor to bytes and back. Imports nothing of torch.distributed."""

from . import blockint as _blockint  # noqa: F401
from . import cast as _cast  # noqa: F401
from . import mpc as _mpc  # noqa: F401
from . import none as _none  # noqa: F401  (registers itself)
from . import zfp as _zfp  # noqa: F401
from .base import Codec
from .registry import codecs, parse, register

__all__ = ["Codec", "codecs", "parse", "register"]
