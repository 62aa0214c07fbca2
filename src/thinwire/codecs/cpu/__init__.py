"""Kernels for the CPU (numba), one file per codec."""
