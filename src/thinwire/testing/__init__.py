"""For tests of codecs and of code that communicates.

:func:`check_codec` (every promise of a codec), :func:`fuzz_codec` (damaged frames), hypothesis strategies,
:func:`run_ranks` (a function on several ranks).
"""

from ..launch import Place, run_ranks
from .coding import decode, encode, same_bits
from .conformance import check_codec
from .fuzz import fuzz_codec
from .strategies import codec_inputs, float_tensors

__all__ = [
    "Place",
    "check_codec",
    "codec_inputs",
    "decode",
    "encode",
    "float_tensors",
    "fuzz_codec",
    "run_ranks",
    "same_bits",
]
