"""Kernels for CUDA devices (Triton), one file per codec, with the file names of ``codecs/cpu``.

Written so that their bytes are those of the CPU kernels: rounding in integer arithmetic, divisions by ``div_rn``, no cast
between float formats, nothing that a compiler could fuse. The tests run them in Triton's interpreter.
"""
