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
from numba.core import cgutils, config
from numba.core.datamodel import PrimitiveModel, StructModel
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
        super().__init__(manager, kind, _ir_type(kind))


def _ir_type(kind):
    return ir.VectorType(_lane_type(kind.dtype), kind.lanes)


def _lane_type(dtype):
    if isinstance(dtype, types.Float):
        return ir.FloatType() if dtype.bitwidth == 32 else ir.DoubleType()
    return ir.IntType(1 if dtype == types.boolean else dtype.bitwidth)


def _is_vector(kind):
    return isinstance(kind, Vector)


def _splat(builder, value, lanes):
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
            vector = next((a for a in args if _is_vector(a)), None)
            if vector is None or len(args) != 2 or any(_is_vector(a) and a != vector for a in args):
                return None
            taken = (a if _is_vector(a) else vector.dtype for a in args)
            return signature(Vector(gives, vector.lanes) if gives else vector, *taken)

    def lower(context, builder, sig, args):
        vector = next(a for a in sig.args if _is_vector(a))
        a, b = (
            value if _is_vector(kind) else _splat(builder, value, vector.lanes)
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
_define(operator.ne, _comparison("!="), types.boolean)


@intrinsic
def select(typingctx, where, yes, no):
    """Lanes of ``yes`` where the comparison held, else of ``no``; two vectors."""

    def codegen(context, builder, sig, args):
        return builder.select(*args)

    if _is_vector(where) and yes == no and _is_vector(yes) and where.lanes == yes.lanes:
        return yes(where, yes, no), codegen


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
        x, y = args[0], args[1] if _is_vector(sig.args[1]) else _splat(builder, args[1], a.lanes)
        return builder.select(_comparison(sign)(builder, a.dtype, x, y), x, y)

    if _is_vector(a) and isinstance(a.dtype, types.Integer):
        return a(a, b if _is_vector(b) else a.dtype), codegen


# Memory.


class Span(types.Type):
    """The type of an array's memory without a share in its ownership, for inner loops.

    Handing arrays to functions, numba counts their owners, atomically, at every call. A span does not keep
    its array alive: make it of an argument, which the caller holds.
    """

    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(name=f"Span({dtype})")


@register_model(Span)
class _SpanModel(StructModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, [("data", types.CPointer(kind.dtype)), ("size", types.uint64)])


@intrinsic
def span(typingctx, array):
    """The memory of a flat, contiguous array."""

    def codegen(context, builder, sig, args):
        fields = context.make_array(sig.args[0])(context, builder, args[0])
        made = cgutils.create_struct_proxy(sig.return_type)(context, builder)
        made.data, made.size = fields.data, fields.nitems
        return made._getvalue()

    if isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C":
        return Span(array.dtype)(array), codegen


@intrinsic(prefer_literal=True)
def load(typingctx, memory, at, lanes):
    """The ``lanes`` (a constant) values of a span from index ``at`` on."""

    def codegen(context, builder, sig, args):
        found = builder.load(_address(context, builder, sig.args[0], args[0], args[1], sig.return_type))
        found.align = 1
        return found

    if isinstance(memory, Span) and isinstance(lanes, types.IntegerLiteral):
        return Vector(memory.dtype, lanes.literal_value)(memory, types.uint64, lanes), codegen


@intrinsic
def gather(typingctx, memory, places):
    """The values of a span at ``places``, a vector of uint32."""
    to = Vector(memory.dtype, places.lanes)

    def codegen(context, builder, sig, args):
        fields = cgutils.create_struct_proxy(sig.args[0])(context, builder, value=args[0])
        lanes, word = places.lanes, ir.IntType(64)
        if config.BOUNDSCHECK:
            most = _reduce(builder, places, "umax", args[1])
            _check(context, builder, builder.icmp_unsigned(">=", builder.zext(most, word), fields.size))
        nbytes = builder.mul(
            builder.zext(args[1], ir.VectorType(word, lanes)),
            _splat(builder, word(memory.dtype.bitwidth // 8), lanes),
        )
        start = _splat(builder, builder.ptrtoint(fields.data, word), lanes)
        pointer = ir.VectorType(_lane_type(memory.dtype).as_pointer(), lanes)
        where = builder.inttoptr(builder.add(start, nbytes), pointer)
        every = ir.Constant(ir.VectorType(ir.IntType(1), lanes), [1] * lanes)
        kind = ir.FunctionType(_ir_type(to), [pointer, ir.IntType(32), every.type, _ir_type(to)])
        name = f"llvm.masked.gather.v{lanes}i{memory.dtype.bitwidth}.v{lanes}p0"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(
            function, [where, ir.IntType(32)(1), every, ir.Constant(_ir_type(to), ir.Undefined)]
        )

    if isinstance(memory, Span) and isinstance(memory.dtype, types.Integer) and places.dtype == types.uint32:
        return to(memory, places), codegen


@intrinsic
def store(typingctx, memory, at, vector):
    """Write a vector to a span of its dtype from index ``at`` on."""

    def codegen(context, builder, sig, args):
        address = _address(context, builder, sig.args[0], args[0], args[1], sig.args[2])
        builder.store(args[2], address).align = 1
        return context.get_dummy_value()

    if isinstance(memory, Span) and _is_vector(vector) and memory.dtype == vector.dtype:
        return types.none(memory, types.uint64, vector), codegen


def _address(context, builder, kind, value, at, vector):
    """Where a vector lies in a span. With numba's bounds checks on, an IndexError if not all of it does."""
    memory = cgutils.create_struct_proxy(kind)(context, builder, value=value)
    if config.BOUNDSCHECK:
        room = builder.sub(memory.size, at)
        beyond = builder.icmp_unsigned(">", at, memory.size)
        short = builder.icmp_unsigned("<", room, room.type(vector.lanes))
        _check(context, builder, builder.or_(beyond, short))
    return builder.bitcast(builder.gep(memory.data, [at]), _ir_type(vector).as_pointer())


def _check(context, builder, wrong):
    """Raise IndexError if ``wrong``."""
    with builder.if_then(wrong, likely=False):
        context.call_conv.return_user_exc(builder, IndexError, ("a vector beyond the end of its span",))


# Other dtypes, parts.


@intrinsic
def convert(typingctx, vector, dtype):
    """Each lane as a value of ``dtype``: wider integers, the low bits of narrower ones, floats of integers."""
    to = Vector(dtype.dtype, vector.lanes)

    def codegen(context, builder, sig, args):
        have, want, target = vector.dtype, to.dtype, _ir_type(to)
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
        return builder.bitcast(args[0], _ir_type(to))

    return to(vector, dtype), codegen


@intrinsic(prefer_literal=True)
def fill(typingctx, value, lanes):
    """``lanes`` (a constant) times the value."""
    if isinstance(lanes, types.IntegerLiteral):
        kind = Vector(types.unliteral(value), lanes.literal_value)

        def codegen(context, builder, sig, args):
            return _splat(builder, args[0], kind.lanes)

        return kind(kind.dtype, lanes), codegen


@intrinsic(prefer_literal=True)
def zeros(typingctx, memory, lanes):
    """``lanes`` (a constant) zeros of a span's dtype."""
    if isinstance(memory, Span) and isinstance(lanes, types.IntegerLiteral):
        kind = Vector(memory.dtype, lanes.literal_value)

        def codegen(context, builder, sig, args):
            return ir.Constant(_ir_type(kind), None)

        return kind(memory, lanes), codegen


@intrinsic(prefer_literal=True)
def numbers(typingctx, dtype, lanes):
    """0, 1, 2, ... in ``lanes`` (a constant) lanes of an integer dtype."""
    if isinstance(lanes, types.IntegerLiteral):
        kind = Vector(dtype.dtype, lanes.literal_value)

        def codegen(context, builder, sig, args):
            return ir.Constant(_ir_type(kind), list(range(kind.lanes)))

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
def largest(typingctx, vector):
    """The largest lane, an integer."""
    return _reduced(vector, "smax" if vector.dtype.signed else "umax")


@intrinsic
def any_bit(typingctx, vector):
    """The bits that are set in any lane of integers."""
    return _reduced(vector, "or")


def _reduced(vector, how):
    def codegen(context, builder, sig, args):
        return _reduce(builder, vector, how, args[0])

    if isinstance(vector.dtype, types.Integer):
        return vector.dtype(vector), codegen


def _reduce(builder, vector, how, value):
    kind = ir.FunctionType(_lane_type(vector.dtype), [_ir_type(vector)])
    name = f"llvm.vector.reduce.{how}.v{vector.lanes}i{vector.dtype.bitwidth}"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [value])
