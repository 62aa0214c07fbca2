"""Vectors for kernels: so many lanes of one dtype in registers, with the operators that numpy's scalars have.

What numba's compiler makes of a loop depends on what it can prove of the arrays in it; a vector is what it says. The
lanes are those of the code, not of the machine: LLVM splits them where registers are narrower, so the results are
the same everywhere. Additions and products are one operation each and are never fused.

A scalar beside a vector becomes one of its dtype in every lane. Shifts are logical for unsigned lanes and arithmetic
for signed ones; comparisons give lanes for :func:`select`.
"""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="misc,import-untyped,attr-defined"

from __future__ import annotations

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, register_model


class Vector(types.Type):
    """The type of a vector: ``lanes`` values of ``dtype``, a numba type of numbers or truth values."""

    def __init__(self, dtype, lanes):
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"Vector({dtype}, {lanes})")


@register_model(Vector)
class _VectorModel(PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, ir_type(kind))


def ir_type(kind):
    return ir.VectorType(lane_type(kind.dtype), kind.lanes)


def lane_type(dtype):
    if isinstance(dtype, types.Float):
        return ir.FloatType() if dtype.bitwidth == 32 else ir.DoubleType()
    return ir.IntType(1 if dtype == types.boolean else dtype.bitwidth)


def is_vector(kind):
    return isinstance(kind, Vector)


def splat(builder, value, lanes):
    """A vector with ``value`` in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    one = builder.insert_element(undefined, value, ir.IntType(32)(0))
    return _shuffle(builder, one, one, [0] * lanes)


def _shuffle(builder, a, b, lanes):
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(a, b, mask)


# Operators of two vectors, or of one and a scalar.


def _define(op, emit, gives=None):
    """Define ``op``: emit(builder, dtype, a, b) makes its instruction; gives: dtype of the result if not the operands'."""

    @infer_global(op)
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            vector = next((a for a in args if is_vector(a)), None)
            if vector is None or len(args) != 2 or any(is_vector(a) and a != vector for a in args):
                return None
            taken = (a if is_vector(a) else vector.dtype for a in args)
            return signature(Vector(gives, vector.lanes) if gives else vector, *taken)

    def lower(context, builder, sig, args):
        vector = next(a for a in sig.args if is_vector(a))
        a, b = (
            value if is_vector(kind) else splat(builder, value, vector.lanes)
            for kind, value in zip(sig.args, args, strict=True)
        )
        return emit(builder, vector.dtype, a, b)

    lower_builtin(op, Vector, Vector)(lower)
    lower_builtin(op, Vector, types.Any)(lower)
    lower_builtin(op, types.Any, Vector)(lower)


def _arithmetic(integer, floating):
    def emit(builder, dtype, a, b):
        return getattr(builder, floating if isinstance(dtype, types.Float) else integer)(a, b)

    return emit


def _right_shift(builder, dtype, a, b):
    return builder.ashr(a, b) if dtype.signed else builder.lshr(a, b)


def _comparison(sign):
    def emit(builder, dtype, a, b):
        if isinstance(dtype, types.Float):
            return builder.fcmp_ordered(sign, a, b)
        return (builder.icmp_signed if dtype.signed else builder.icmp_unsigned)(sign, a, b)

    return emit


_define(operator.add, _arithmetic("add", "fadd"))
_define(operator.sub, _arithmetic("sub", "fsub"))
_define(operator.mul, _arithmetic("mul", "fmul"))
_define(operator.truediv, _arithmetic("", "fdiv"))
_define(operator.and_, _arithmetic("and_", ""))
_define(operator.or_, _arithmetic("or_", ""))
_define(operator.xor, _arithmetic("xor", ""))
_define(operator.lshift, _arithmetic("shl", ""))
_define(operator.rshift, _right_shift)
_define(operator.lt, _comparison("<"), types.boolean)
_define(operator.gt, _comparison(">"), types.boolean)
_define(operator.eq, _comparison("=="), types.boolean)


@intrinsic
def select(typingctx, where, yes, no):
    """Lanes of ``yes`` where the comparison held, else of ``no``; two vectors, or one and a scalar."""
    vector = yes if is_vector(yes) else no
    if not (is_vector(where) and is_vector(vector) and where.lanes == vector.lanes):
        return None
    if any(is_vector(side) and side != vector for side in (yes, no)):
        return None

    def codegen(context, builder, sig, args):
        sides = (
            value if is_vector(kind) else splat(builder, value, vector.lanes)
            for kind, value in zip(sig.args[1:], args[1:], strict=True)
        )
        return builder.select(args[0], *sides)

    taken = (side if is_vector(side) else vector.dtype for side in (yes, no))
    return vector(where, *taken), codegen


@intrinsic
def smaller(typingctx, a, b):
    """The smaller of two integers, lane by lane. b: a vector, or a scalar."""
    return _extreme(a, b, "<")


@intrinsic
def larger(typingctx, a, b):
    """The larger of two integers, lane by lane. b: a vector, or a scalar."""
    return _extreme(a, b, ">")


def _extreme(a, b, sign):
    def codegen(context, builder, sig, args):
        x, y = args[0], args[1] if is_vector(sig.args[1]) else splat(builder, args[1], a.lanes)
        return builder.select(_comparison(sign)(builder, a.dtype, x, y), x, y)

    if is_vector(a) and isinstance(a.dtype, types.Integer):
        return a(a, b if is_vector(b) else a.dtype), codegen


# Other dtypes, parts.


@intrinsic
def convert(typingctx, vector, dtype):
    """Each lane as a value of ``dtype``: wider integers, the low bits of narrower ones, floats of integers."""
    to = Vector(dtype.dtype, vector.lanes)

    def codegen(context, builder, sig, args):
        have, want, target = vector.dtype, to.dtype, ir_type(to)
        if isinstance(want, types.Float):
            return (builder.sitofp if have.signed else builder.uitofp)(args[0], target)
        if isinstance(have, types.Float):
            return (builder.fptosi if want.signed else builder.fptoui)(args[0], target)
        if want.bitwidth < have.bitwidth:
            return builder.trunc(args[0], target)
        if want.bitwidth == have.bitwidth:
            return args[0]
        return (builder.sext if have.signed else builder.zext)(args[0], target)

    return to(vector, dtype), codegen


@intrinsic
def reinterpret(typingctx, vector, dtype):
    """The same bits as lanes of ``dtype``, more or fewer of them."""
    to = Vector(dtype.dtype, vector.lanes * vector.dtype.bitwidth // dtype.dtype.bitwidth)

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], ir_type(to))

    return to(vector, dtype), codegen


@intrinsic(prefer_literal=True)
def fill(typingctx, value, lanes):
    """``lanes`` (a constant) times the value."""
    if isinstance(lanes, types.IntegerLiteral):
        kind = Vector(types.unliteral(value), lanes.literal_value)

        def codegen(context, builder, sig, args):
            return splat(builder, args[0], kind.lanes)

        return kind(kind.dtype, lanes), codegen


@intrinsic(prefer_literal=True)
def numbers(typingctx, dtype, lanes):
    """0, 1, 2, ... in ``lanes`` (a constant) lanes of an integer dtype."""
    if isinstance(lanes, types.IntegerLiteral):
        kind = Vector(dtype.dtype, lanes.literal_value)

        def codegen(context, builder, sig, args):
            return ir.Constant(ir_type(kind), list(range(kind.lanes)))

        return kind(dtype, lanes), codegen


@intrinsic(prefer_literal=True)
def lane(typingctx, vector, index):
    """The scalar in lane ``index`` (a constant)."""
    if isinstance(index, types.IntegerLiteral):

        def codegen(context, builder, sig, args):
            return builder.extract_element(args[0], ir.IntType(32)(index.literal_value))

        return vector.dtype(vector, index), codegen


@intrinsic
def lower_half(typingctx, vector):
    """The first half of a vector's lanes."""
    return _part(vector, 0)


@intrinsic
def upper_half(typingctx, vector):
    """The second half of a vector's lanes."""
    return _part(vector, vector.lanes // 2)


def _part(vector, first):
    lanes = vector.lanes // 2

    def codegen(context, builder, sig, args):
        return _shuffle(builder, args[0], args[0], list(range(first, first + lanes)))

    return Vector(vector.dtype, lanes)(vector), codegen


@intrinsic
def join(typingctx, a, b):
    """One vector of the lanes of two of a kind."""

    def codegen(context, builder, sig, args):
        return _shuffle(builder, args[0], args[1], list(range(2 * a.lanes)))

    if a == b:
        return Vector(a.dtype, 2 * a.lanes)(a, b), codegen


@intrinsic
def evens(typingctx, a, b):
    """Every second lane of the two of a kind, beginning with the first."""
    return _every_second(a, b, 0)


@intrinsic
def odds(typingctx, a, b):
    """Every second lane of the two of a kind, beginning with the second."""
    return _every_second(a, b, 1)


def _every_second(a, b, first):
    def codegen(context, builder, sig, args):
        return _shuffle(builder, args[0], args[1], list(range(first, 2 * a.lanes, 2)))

    if a == b:
        return a(a, b), codegen


@intrinsic
def mask(typingctx, where):
    """A comparison of 8, 16 or 32 lanes as the bits of an unsigned integer, the first lane's lowest."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], ir.IntType(where.lanes))

    if is_vector(where) and where.dtype == types.boolean and where.lanes in (8, 16, 32):
        return types.Integer.from_bitwidth(where.lanes, signed=False)(where), codegen


@intrinsic
def first_bit(typingctx, value):
    """The place of the lowest bit that is set in an unsigned integer, which is not 0."""

    def codegen(context, builder, sig, args):
        return builder.cttz(args[0], ir.IntType(1)(1))

    if isinstance(value, types.Integer) and not value.signed:
        return value(value), codegen


@intrinsic(prefer_literal=True)
def mirror(typingctx, vector, distance):
    """Each lane from the one whose number differs in the bit ``distance`` (a constant)."""

    def codegen(context, builder, sig, args):
        return _shuffle(builder, args[0], args[0], [i ^ distance.literal_value for i in range(vector.lanes)])

    if is_vector(vector) and isinstance(distance, types.IntegerLiteral):
        return vector(vector, distance), codegen


@intrinsic
def largest(typingctx, vector):
    """The largest lane, an integer."""
    return _reduced(vector, "smax" if vector.dtype.signed else "umax")


@intrinsic
def any_bit(typingctx, vector):
    """The bits that are set in any lane of integers."""
    return _reduced(vector, "or")


@intrinsic
def total(typingctx, vector):
    """The sum of integer lanes."""
    return _reduced(vector, "add")


def _reduced(vector, how):
    def codegen(context, builder, sig, args):
        return reduce(builder, vector, how, args[0])

    if isinstance(vector.dtype, types.Integer):
        return vector.dtype(vector), codegen


def reduce(builder, vector, how, value):
    kind = ir.FunctionType(lane_type(vector.dtype), [ir_type(vector)])
    name = f"llvm.vector.reduce.{how}.v{vector.lanes}i{vector.dtype.bitwidth}"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [value])
