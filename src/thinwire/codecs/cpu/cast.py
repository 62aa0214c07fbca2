"""Kernels of ``bf16`` and ``fp16``, and of adding 16-bit values to fp32 ones. 16-bit values are bytes, at any alignment."""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,var-annotated"

from __future__ import annotations

import numpy as np
from numba import njit

from .spans import load, span, store
from .values import INF, prefetch
from .vector_values import narrow_lanes, widen_lanes
from .vectors import convert, reinterpret, select

_LANES = np.uint64(16)
_AHEAD = np.uint64(1024)
_NAN = np.float32(np.nan)


@njit(nogil=True, cache=True)
def narrow(values, data, half):
    """fp32 to fp16 (half) or bf16: nearest even; infinities stay, finite values stay finite, NaN is quiet with its sign."""
    source, into = span(values), span(data)
    whole = np.uint64(values.size) & ~np.uint64(15)
    for j in range(np.uint64(0), whole, _LANES):
        prefetch(source, j + _AHEAD)
        store(into, np.uint64(2) * j, _narrowed(load(source, j, 16), half))
    for j in range(whole, np.uint64(values.size)):
        store(into, np.uint64(2) * j, _narrowed(load(source, j, 1), half))


@njit(nogil=True, cache=True, forceinline=True)
def _narrowed(values, half):
    """fp32 values as the bytes of 16-bit ones."""
    bits = reinterpret(values, np.uint32)
    top = ((bits >> 16) & np.uint32(0x8000)) | np.uint32(0x7C00 if half else 0x7F80)
    infinite = (bits & np.uint32(0x7FFFFFFF)) == np.uint32(INF)
    return reinterpret(convert(select(infinite, top, narrow_lanes(values, half, _NAN)), np.uint16), np.uint8)


@njit(nogil=True, cache=True)
def widen(data, values, half):
    """fp16 (half) or bf16 to fp32, exactly."""
    source, into = span(data), span(values)
    whole = np.uint64(values.size) & ~np.uint64(15)
    for j in range(np.uint64(0), whole, _LANES):
        prefetch(into, j + _AHEAD)
        store(into, j, _widened(load(source, np.uint64(2) * j, 32), half))
    for j in range(whole, np.uint64(values.size)):
        store(into, j, _widened(load(source, np.uint64(2) * j, 2), half))


@njit(nogil=True, cache=True)
def add(data, sums, half):
    """sums (fp32) += fp16 (half) or bf16 values."""
    source, into = span(data), span(sums)
    whole = np.uint64(sums.size) & ~np.uint64(15)
    for j in range(np.uint64(0), whole, _LANES):
        prefetch(into, j + _AHEAD)
        store(into, j, load(into, j, 16) + _widened(load(source, np.uint64(2) * j, 32), half))
    for j in range(whole, np.uint64(sums.size)):
        store(into, j, load(into, j, 1) + _widened(load(source, np.uint64(2) * j, 2), half))


@njit(nogil=True, cache=True, forceinline=True)
def _widened(data, half):
    """The bytes of 16-bit values as fp32 ones."""
    return widen_lanes(convert(reinterpret(data, np.uint16), np.int32), half)
