"""What the kernels of several codecs share: values of any dtype in and out as fp32, and prefetching.

16-bit values are uint16 bits; ``half`` tells fp16 from bf16. fp32 values are read as int32 bits.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped"

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

INF = np.int32(0x7F800000)


@intrinsic
def prefetch(typingctx, array, index):
    """Ask for the cache line of array[index] (or of a span), for reading. It may lie beyond the end: no access happens."""

    def codegen(context, builder, signature, args):
        source = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0])
        address = builder.bitcast(builder.gep(source.data, [args[1]]), ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [address, i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.none(array, index), codegen


@njit(nogil=True, cache=True)
def narrow(v, half):
    """fp32 to the bits of fp16 (half) or bf16: nearest even, finite values stay finite, NaN is quiet."""
    u = np.float32(v).view(np.int32)
    a = np.int32(u & np.int32(0x7FFFFFFF))
    sign = np.int32((u >> np.int32(16)) & np.int32(0x8000))
    if half:
        r = np.int32(
            np.int32(a - np.int32(0x38000000 - 0xFFF) + ((a >> np.int32(13)) & np.int32(1))) >> np.int32(13)
        )
        r = np.int32(min(r, np.int32(0x7BFF)))
        # 0.5 has the ulp 2**-24, which is fp16's subnormal step.
        s = np.float32(np.int32(a).view(np.float32) + np.float32(0.5)).view(np.int32)
        r = np.int32(s - np.int32(0x3F000000)) if a < np.int32(0x38800000) else r
        r = np.int32(0x7E00) if a > INF else r
    else:
        r = np.int32(np.int32(a + np.int32(0x7FFF) + ((a >> np.int32(16)) & np.int32(1))) >> np.int32(16))
        r = np.int32(min(r, np.int32(0x7F7F)))
        r = np.int32(0x7FC0) if a > INF else r
    return np.uint16(r | sign)


@njit(nogil=True, cache=True)
def widen(h, half):
    """The bits of an fp16 (half) or bf16 value to fp32 bits, exactly."""
    u = np.int32(h)
    if half:
        a = np.int32((u & np.int32(0x7FFF)) << np.int32(13))
        r = np.int32(a + np.int32(0x38000000))
        r = np.int32(a + np.int32(0x70000000)) if a >= np.int32(0x0F800000) else r
        s = np.float32(np.int32(a + np.int32(0x38800000)).view(np.float32) - np.float32(2.0**-14)).view(
            np.int32
        )
        r = s if a < np.int32(0x00800000) else r
        return np.int32(r | np.int32((u & np.int32(0x8000)) << np.int32(16)))
    return np.int32(u << np.int32(16))


def load(x, first, n, half, bits):
    """The n values of x from ``first`` as fp32 bits."""


@overload(load)
def _load_overload(x, first, n, half, bits):
    if x.dtype == types.int32:

        def load32(x, first, n, half, bits):
            for j in range(n):
                bits[j] = x[first + j]

        return load32

    def load16(x, first, n, half, bits):
        if half:
            for j in range(n):
                bits[j] = widen(x[first + j], True)
        else:
            for j in range(n):
                bits[j] = widen(x[first + j], False)

    return load16


def store(values, out, first, n, half):
    """n values to out from ``first``, rounded to its dtype."""


@overload(store)
def _store_overload(values, out, first, n, half):
    if out.dtype == types.float32:

        def store32(values, out, first, n, half):
            for j in range(n):
                out[first + j] = values[j]

        return store32

    def store16(values, out, first, n, half):
        if half:
            for j in range(n):
                out[first + j] = narrow(values[j], True)
        else:
            for j in range(n):
                out[first + j] = narrow(values[j], False)

    return store16


@njit(nogil=True, cache=True)
def round_to_16_bits(values, narrowed, n, half):
    """n (uint64) fp32 values to fp16 (half) or bf16 and back, in place; narrowed: scratch of n uint16."""
    store(values, narrowed, np.uint64(0), n, half)
    load(narrowed, np.uint64(0), n, half, values.view(np.int32))
