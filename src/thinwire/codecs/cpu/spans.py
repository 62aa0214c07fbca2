"""Memory for vectors: arrays without their owners' count, vectors out of them and into them at any alignment."""

# numba types the kernels; mypy cannot.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="misc,import-untyped,attr-defined"

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.datamodel import StructModel
from numba.extending import intrinsic, register_model

from .vectors import Vector, ir_type, is_vector, lane_type, reduce, splat


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
            most = reduce(builder, places, "umax", args[1])
            _check(context, builder, builder.icmp_unsigned(">=", builder.zext(most, word), fields.size))
        nbytes = builder.mul(
            builder.zext(args[1], ir.VectorType(word, lanes)),
            splat(builder, word(memory.dtype.bitwidth // 8), lanes),
        )
        start = splat(builder, builder.ptrtoint(fields.data, word), lanes)
        pointer = ir.VectorType(lane_type(memory.dtype).as_pointer(), lanes)
        where = builder.inttoptr(builder.add(start, nbytes), pointer)
        every = ir.Constant(ir.VectorType(ir.IntType(1), lanes), [1] * lanes)
        kind = ir.FunctionType(ir_type(to), [pointer, ir.IntType(32), every.type, ir_type(to)])
        name = f"llvm.masked.gather.v{lanes}i{memory.dtype.bitwidth}.v{lanes}p0"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(
            function, [where, ir.IntType(32)(1), every, ir.Constant(ir_type(to), ir.Undefined)]
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

    if isinstance(memory, Span) and is_vector(vector) and memory.dtype == vector.dtype:
        return types.none(memory, types.uint64, vector), codegen


@intrinsic
def read(typingctx, memory, at, dtype):
    """The value of ``dtype`` that begins at index ``at`` of a span, of bytes or of that dtype."""
    kind = dtype.dtype

    def codegen(context, builder, sig, args):
        place = Vector(memory.dtype, kind.bitwidth // memory.dtype.bitwidth)
        address = _address(context, builder, memory, args[0], args[1], place)
        found = builder.load(builder.bitcast(address, lane_type(kind).as_pointer()))
        found.align = 1
        return found

    if isinstance(memory, Span):
        return kind(memory, types.uint64, dtype), codegen


@intrinsic
def write(typingctx, memory, at, value):
    """Write a value to a span, of bytes or of the value's dtype, from index ``at`` on."""

    def codegen(context, builder, sig, args):
        place = Vector(memory.dtype, value.bitwidth // memory.dtype.bitwidth)
        address = _address(context, builder, memory, args[0], args[1], place)
        builder.store(args[2], builder.bitcast(address, lane_type(value).as_pointer())).align = 1
        return context.get_dummy_value()

    if isinstance(memory, Span):
        return types.none(memory, types.uint64, value), codegen


def _address(context, builder, kind, value, at, vector):
    """Where a vector lies in a span. With numba's bounds checks on, an IndexError if not all of it does."""
    memory = cgutils.create_struct_proxy(kind)(context, builder, value=value)
    if config.BOUNDSCHECK:
        room = builder.sub(memory.size, at)
        beyond = builder.icmp_unsigned(">", at, memory.size)
        short = builder.icmp_unsigned("<", room, room.type(vector.lanes))
        _check(context, builder, builder.or_(beyond, short))
    return builder.bitcast(builder.gep(memory.data, [at]), ir_type(vector).as_pointer())


def _check(context, builder, wrong):
    """Raise IndexError if ``wrong``."""
    with builder.if_then(wrong, likely=False):
        context.call_conv.return_user_exc(builder, IndexError, ("a vector beyond the end of its span",))


@intrinsic(prefer_literal=True)
def zeros(typingctx, memory, lanes):
    """``lanes`` (a constant) zeros of a span's dtype."""
    if isinstance(memory, Span) and isinstance(lanes, types.IntegerLiteral):
        kind = Vector(memory.dtype, lanes.literal_value)

        def codegen(context, builder, sig, args):
            return ir.Constant(ir_type(kind), None)

        return kind(memory, lanes), codegen
