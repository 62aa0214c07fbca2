"""Vectors in kernels do in every lane what numpy does, and stay in their arrays."""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,import-untyped,var-annotated"

from __future__ import annotations

import operator

import numpy as np
import pytest
from numba import njit
from numba.core import config

from thinwire.codecs.cpu import spans, vector_values, vectors
from thinwire.codecs.cpu.values import narrow, widen

RNG = np.random.default_rng(0)
OPERATORS = {
    "int": ("add", "sub", "mul", "and_", "or_", "xor"),
    "float": ("add", "sub", "mul", "truediv"),
}


def _values(dtype, n):
    if np.issubdtype(dtype, np.floating):
        return RNG.standard_normal(n).astype(dtype)
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max, n, dtype, endpoint=True)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32, np.uint32, np.uint64, np.float32])
def test_operators(dtype):
    """Of two vectors, and of one and a scalar; integers wrap around."""
    names = OPERATORS["float" if np.issubdtype(dtype, np.floating) else "int"]
    a, b = _values(dtype, 16), _values(dtype, 16)
    for name in names:
        op = getattr(operator, name)

        @njit
        def kernel(a, b, out, mixed, op=op):
            x, y = (
                spans.load(spans.span(a), np.uint64(0), 16),
                spans.load(spans.span(b), np.uint64(0), 16),
            )
            spans.store(spans.span(out), np.uint64(0), op(x, y))
            spans.store(spans.span(mixed), np.uint64(0), op(x, b[3]))

        out, mixed = np.zeros_like(a), np.zeros_like(a)
        kernel(a, b, out, mixed)
        assert out.tobytes() == op(a, b).tobytes(), name
        assert mixed.tobytes() == op(a, b[3]).tobytes(), name


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint64])
def test_shifts_and_comparisons(dtype):
    """Right shifts keep the sign of signed lanes; a comparison chooses lanes."""

    @njit
    def kernel(a, b, right, left, chosen, small, large):
        x, y = spans.load(spans.span(a), np.uint64(0), 8), spans.load(spans.span(b), np.uint64(0), 8)
        spans.store(spans.span(right), np.uint64(0), x >> 3)
        spans.store(spans.span(left), np.uint64(0), x << 3)
        spans.store(spans.span(chosen), np.uint64(0), vectors.select(x < y, y - x, x - y))
        spans.store(spans.span(small), np.uint64(0), vectors.smaller(x, y))
        spans.store(spans.span(large), np.uint64(0), vectors.larger(x, b[0]))

    a, b = _values(dtype, 8), _values(dtype, 8)
    right, left, chosen, small, large = np.zeros((5, 8), dtype)
    kernel(a, b, right, left, chosen, small, large)
    assert (right == a >> dtype(3)).all()
    assert (left == a << dtype(3)).all()
    assert (chosen == np.where(a < b, b - a, a - b)).all()
    assert (small == np.minimum(a, b)).all()
    assert (large == np.maximum(a, b[0])).all()


def test_lanes_by_their_numbers():
    """A comparison as bits, lanes from those across a bit of their numbers, sums, no lane at all."""

    @njit
    def kernel(a, out):
        x = spans.load(spans.span(a), np.uint64(0), 16)
        spans.store(spans.span(out), np.uint64(0), vectors.mirror(x, 4))
        spans.store(spans.span(out), np.uint64(16), spans.zeros(spans.span(a), 16))
        bits = vectors.mask(x < np.int32(0))
        return bits, vectors.first_bit(bits), vectors.total(x)

    a, out = _values(np.int32, 16), np.ones(32, np.int32)
    bits, first, total = kernel(a, out)
    assert bits == sum(1 << i for i in range(16) if a[i] < 0)
    assert first == (a < 0).argmax()
    assert np.int32(total) == a.sum(dtype=np.int32)
    assert (out[:16] == a[np.arange(16) ^ 4]).all()
    assert not out[16:].any()


def test_parts_and_dtypes():
    """Halves, every second lane, other widths, the same bits as other lanes, reductions, gathers."""

    @njit
    def kernel(a, table, out, words):
        x = spans.load(spans.span(a), np.uint64(3), 16)
        into = spans.span(out)
        low, high = vectors.lower_half(x), vectors.upper_half(x)
        spans.store(into, np.uint64(0), vectors.join(high, low))
        spans.store(into, np.uint64(16), vectors.evens(low, high))
        spans.store(into, np.uint64(24), vectors.odds(low, high))
        spans.store(into, np.uint64(32), vectors.convert(vectors.convert(x, np.int32) * 3, np.uint8))
        wide = spans.gather(spans.span(table), vectors.convert(x, np.uint32))
        spans.store(spans.span(words), np.uint64(0), wide)
        spans.store(
            spans.span(words), np.uint64(16), vectors.numbers(np.uint32, 16) + vectors.fill(table[0], 16)
        )
        pair = vectors.lane(vectors.reinterpret(low, np.uint32), 1)
        return pair, vectors.largest(x), vectors.any_bit(x), vectors.largest(vectors.reinterpret(x, np.int8))

    a, table = _values(np.uint8, 20), _values(np.uint32, 256)
    out, words = np.zeros(48, np.uint8), np.zeros(32, np.uint32)
    pair, most, bits, signed = kernel(a, table, out, words)
    x = a[3:19]
    assert (out[:16] == np.concatenate([x[8:], x[:8]])).all()
    assert (out[16:32] == np.concatenate([x[::2], x[1::2]])).all()
    assert (out[32:] == x * np.uint8(3)).all()
    assert (words[:16] == table[x]).all()
    assert (words[16:] == table[0] + np.arange(16, dtype=np.uint32)).all()
    assert pair == x.view(np.uint32)[1]
    assert (most, bits, signed) == (x.max(), np.bitwise_or.reduce(x), x.view(np.int8).max())


@pytest.mark.parametrize("half", [False, True])
def test_values_of_16_bits(half):
    """Widening all bit patterns and rounding back is what the scalar functions do."""

    @njit
    def kernel(bits, half, wide, back):
        for at in range(np.uint64(0), np.uint64(bits.size), np.uint64(16)):
            values = vector_values.get_floats(spans.span(bits), at, half)
            spans.store(spans.span(wide), at, vectors.reinterpret(values, np.int32))
            vector_values.put_floats(spans.span(back), at, values, half, np.float32(np.nan))

    @njit
    def one_by_one(bits, half, wide, back):
        for j in range(bits.size):
            wide[j] = widen(bits[j], half)
            back[j] = narrow(np.int32(wide[j]).view(np.float32), half)

    bits = np.arange(65536).astype(np.uint16)
    (wide, expected), (back, again) = np.zeros((2, 65536), np.int32), np.zeros((2, 65536), np.uint16)
    kernel(bits, half, wide, back)
    one_by_one(bits, half, expected, again)
    assert (wide == expected).all()
    assert (back == again).all()


@pytest.mark.parametrize("half", [False, True])
def test_rounding_to_16_bits(half):
    """As the scalar function rounds: ties, subnormals, the largest values, NaN, and what nothing has to be cut of."""

    @njit
    def kernel(values, half, most, out):
        for at in range(np.uint64(0), np.uint64(values.size), np.uint64(16)):
            found = spans.load(spans.span(values), at, 16)
            vector_values.put_floats(spans.span(out), at, found, half, most)

    @njit
    def one_by_one(values, half, out):
        for j in range(values.size):
            out[j] = narrow(values[j], half)

    bits = np.concatenate([_values(np.uint32, 4096), np.arange(2**16, dtype=np.uint32) << 15])
    values = bits.astype(np.uint32).view(np.float32)
    out, expected = np.zeros((2, values.size), np.uint16)
    kernel(values, half, np.float32(np.inf), out)
    one_by_one(values, half, expected)
    assert (out == expected).all()
    tame = np.where(np.abs(values) <= 1e38, values, np.float32(1))
    kernel(tame, half, np.float32(1e38), out)
    one_by_one(tame, half, expected)
    assert (out == expected).all()


def test_bytes_are_copied_to_the_last():
    """Any length, and nothing beside it."""

    @njit
    def kernel(source, target, n):
        vector_values.copy_bytes(spans.span(source), np.uint64(7), spans.span(target), np.uint64(11), n)

    source = _values(np.uint8, 200)
    for n in (0, 1, 31, 32, 33, 64, 100, 150):
        target = np.zeros(200, np.uint8)
        kernel(source, target, np.uint64(n))
        assert (target[11 : 11 + n] == source[7 : 7 + n]).all()
        assert not target[:11].any()
        assert not target[11 + n :].any()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.uint64])
def test_single_values_at_any_alignment(dtype):
    """Out of bytes and into them, and of a span of their own dtype."""

    @njit
    def kernel(data, values, at, back):
        spans.write(spans.span(back), at, spans.read(spans.span(data), at, dtype))
        spans.write(spans.span(values), np.uint64(1), spans.read(spans.span(values), np.uint64(0), dtype))

    data, values = _values(np.uint8, 16), _values(dtype, 2)
    n, back = np.dtype(dtype).itemsize, np.zeros(16, np.uint8)
    kernel(data, values, np.uint64(3), back)
    assert (back[3 : 3 + n] == data[3 : 3 + n]).all()
    assert not back[:3].any()
    assert not back[3 + n :].any()
    assert values[1].tobytes() == values[0].tobytes()


def test_bounds_are_checked_where_numba_checks_them(monkeypatch):
    """A vector that is not wholly inside its span is an IndexError then."""
    monkeypatch.setattr(config, "BOUNDSCHECK", 1)

    @njit
    def read(a, at):
        return vectors.largest(spans.load(spans.span(a), at, 16))

    @njit
    def write(a, at):
        spans.store(spans.span(a), at, vectors.fill(np.int32(1), 16))

    @njit
    def pick(a, places):
        return vectors.largest(spans.gather(spans.span(a), spans.load(spans.span(places), np.uint64(0), 4)))

    @njit
    def read_word(a, at):
        return spans.read(spans.span(a), at, np.uint64)

    @njit
    def write_word(a, at):
        spans.write(spans.span(a), at, np.uint64(1))

    data = np.zeros(20, np.uint8)
    assert read_word(data, np.uint64(12)) == 0
    write_word(data, np.uint64(12))
    for beyond in (13, 20, 2**64 - 4):
        with pytest.raises(IndexError):
            read_word(data, np.uint64(beyond))
        with pytest.raises(IndexError):
            write_word(data, np.uint64(beyond))
    a, places = np.arange(20, dtype=np.int32), np.array([0, 5, 19, 2], np.uint32)
    assert read(a, np.uint64(4)) == 19
    assert pick(a, places) == 19
    write(a, np.uint64(4))
    for beyond in (5, 20, 21, 2**63, 2**64 - 8):
        with pytest.raises(IndexError):
            read(a, np.uint64(beyond))
        with pytest.raises(IndexError):
            write(a, np.uint64(beyond))
    places[1] = 20
    with pytest.raises(IndexError):
        pick(a, places)
