"""Every promise that a codec makes, checked: :func:`check_codec`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ..codecs import Codec, parse
from ..errors import ThinwireError, UnsupportedError, WireError
from .coding import INTEGERS, decode, encode, magnitudes, same_bits

_NUMELS = (0, 1, 2, 3, 5, 31, 127, 128, 129, 1000)


def check_codec(codec: Codec) -> None:
    """Check on the CPU every promise that a codec makes; takes seconds. Raises AssertionError naming the broken one.

    Checked: spec and repr round-trip; any shape, numel and alignment of every dtype; declared sizes; the error
    bound, or every bit if lossless; NaN and Inf; magnitudes from 1e-30 to 1e30, of fp64 1e-300 to 1e300; ``decode_add`` and
    ``encode_residual`` against ``decode``; same bytes again, with another number of threads, and in a buffer of
    other contents; untouched inputs; refusal of wrong arguments with outputs untouched; damaged payloads; of a
    stateful codec both ends of a stream, with and without what they remember.
    """
    _check_names(codec)
    for dtype in sorted(codec.dtypes, key=str):
        for label, x in _messages(dtype):
            _check_message(codec, x, f"{codec}, {label} {dtype} {tuple(x.shape)}")
        _check_alignment(codec, dtype)
        _check_non_finite(codec, dtype)
        _check_threads(codec, dtype)
        _check_damage(codec, dtype)
        _check_states(codec, dtype)
        _check_refusals(codec, dtype)


def _check_names(codec: Codec) -> None:
    _that(parse(str(codec)) == codec, f"{codec}: str() does not parse back to an equal codec")
    scope = {type(codec).__name__: type(codec)}
    _that(eval(repr(codec), scope) == codec, f"{codec}: repr() does not evaluate back to an equal codec")
    _that(hash(codec) == hash(parse(str(codec))), f"{codec}: equal codecs hash differently")
    _that(codec.granule >= 1, f"{codec}: granule {codec.granule} is not positive")


def _messages(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Finite messages: sizes, shapes, magnitudes and patterns."""
    rng = torch.Generator().manual_seed(20240902)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    largest = torch.finfo(dtype).max
    for n in _NUMELS:
        yield "normal", normal(n).to(dtype)
    yield "shaped", normal(3, 5, 7).to(dtype)
    yield "scalar", normal(1).reshape(()).to(dtype)
    yield "empty", torch.empty(4, 0, 2, dtype=dtype)
    reach = magnitudes(dtype)
    for exponent in range(-reach, reach + 1, reach // 5):
        yield f"1e{exponent} times normal", (normal(300) * 10.0**exponent).clamp(-largest, largest).to(dtype)
    mixed = normal(515) * 10.0 ** torch.randint(-reach, reach, (515,), generator=rng).double()
    yield "mixed magnitudes", mixed.clamp(-largest, largest).to(dtype)
    yield "zeros", torch.zeros(200, dtype=dtype)
    yield "constant", torch.full((200,), -0.1234567, dtype=dtype)
    yield "two values", torch.tensor([0.3, -0.3], dtype=dtype).repeat(100)
    yield "sparse", torch.where(torch.rand(700, generator=rng) < 0.02, normal(700), 0.0).to(dtype)
    yield (
        "largest",
        torch.full((130,), largest, dtype=dtype) * torch.randint(0, 2, (130,), generator=rng).mul(2).sub(1),
    )
    yield (
        "largest and small",
        torch.tensor([largest, -largest, 1.0, -0.0, 0.9], dtype=torch.float64).to(dtype).repeat(40),
    )
    size = torch.finfo(dtype).bits // 8
    tiny = torch.randint(1, 100, (150,), generator=rng).to(INTEGERS[size])
    yield "subnormal", tiny.view(dtype)


def _check_message(codec: Codec, x: Tensor, what: str) -> None:
    before = x.clone()
    limit = codec.max_nbytes(x.numel(), x.dtype)
    payloads = []
    for fill in (0, 0xFF):
        # Exactly the declared size, between guard bytes.
        room = torch.full((limit + 16,), fill, dtype=torch.uint8)
        size = codec.encode(x, room[8 : 8 + limit], seed=5)
        _that(same_bits(x, before), f"{what}: encode changed its input")
        _that(0 <= size <= limit, f"{what}: encode returned {size} bytes, max_nbytes is {limit}")
        _that(size == limit or not codec.fixed_size, f"{what}: fixed size is {limit}, encode returned {size}")
        parts = sum(codec.payload_parts(x.numel(), x.dtype)) if codec.fixed_size else limit
        _that(parts == limit, f"{what}: payload_parts are {parts} bytes, max_nbytes is {limit}")
        guards = torch.cat([room[:8], room[8 + limit :]])
        _that(bool((guards == fill).all()), f"{what}: encode wrote outside of out")
        payloads.append(room[8 : 8 + size])
    payload = payloads[0]
    _that(torch.equal(*payloads), f"{what}: the payload depends on what the buffer held, or on the call")

    y = decode(codec, payload, x)
    _that(torch.equal(*payloads), f"{what}: decode changed the payload")
    _that(same_bits(y, decode(codec, payload, x)), f"{what}: decoding twice gives two results")
    if codec.lossless:
        _that(same_bits(x, y), f"{what}: lossless, but bits changed")
    _that(bool(torch.isfinite(y).all()), f"{what}: a finite message decoded to non-finite values")
    bound = codec.error_bound(x)
    if bound is not None:
        _that(
            bound.shape == x.shape and bound.dtype == torch.float64,
            f"{what}: error_bound is not float64 of x's shape",
        )
        excess = (y.double() - x.double()).abs() - bound
        _that(not bool((excess > 0).any()), f"{what}: an error is {_most(excess):.3g} above its bound")
    _check_sums(codec, x, y, payload, what)


def _check_sums(codec: Codec, x: Tensor, y: Tensor, payload: Tensor, what: str) -> None:
    """decode_add and encode_residual say what decode says."""
    start = torch.linspace(-2, 2, x.numel()).reshape(x.shape)
    total = start.clone()
    codec.decode_add(payload, total, x.dtype)
    _that(same_bits(total, start + y.float()), f"{what}: decode_add differs from out + float32(decoded)")
    if x.dtype == torch.float32:
        in_place = x.clone()
        for source, residual in ((x, torch.empty_like(x)), (in_place, in_place)):
            out = torch.empty(codec.max_nbytes(x.numel(), x.dtype), dtype=torch.uint8)
            size = codec.encode_residual(source, out, residual, seed=5)
            _that(
                torch.equal(out[:size], payload), f"{what}: encode_residual and encode give different bytes"
            )
            _that(torch.equal(residual, x - y), f"{what}: the residual is not x - decoded")


def _check_alignment(codec: Codec, dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 777).to(dtype)
    expected = encode(codec, x)
    for shift in (1, 2, 3, 5):
        what = f"{codec}, {dtype}, input {shift} values and payload {shift} bytes off"
        source = torch.zeros(800, dtype=dtype)[shift : shift + 777].copy_(x)
        room = torch.zeros(codec.max_nbytes(777, dtype) + shift, dtype=torch.uint8)
        size = codec.encode(source, room[shift:])
        payload = room[shift : shift + size]
        _that(torch.equal(payload, expected), f"{what}: other bytes")
        target = torch.zeros(800, dtype=dtype)
        codec.decode(payload, target[shift : shift + 777])
        _that(same_bits(target[shift : shift + 777], decode(codec, expected, x)), f"{what}: other values")
        edges = torch.cat([target[:shift], target[shift + 777 :]])
        _that(not bool(edges.any()), f"{what}: decode wrote outside of out")


def _check_non_finite(codec: Codec, dtype: torch.dtype) -> None:
    """Non-finiteness survives decode and decode_add and stays near where it was; lossless codecs keep the bits."""
    n = 4 * codec.granule + 8
    for value, at in itertools.product(
        (torch.nan, -torch.nan, torch.inf, -torch.inf), (0, codec.granule + 1, n - 1)
    ):
        what = f"{codec}, {dtype}, {value} at {at} of {n}"
        x = torch.linspace(-1, 1, n).to(dtype)
        x[at] = value
        payload = encode(codec, x)
        y = decode(codec, payload, x)
        _that(not codec.lossless or same_bits(x, y), f"{what}: lossless, but bits changed")
        block = slice(at // codec.granule * codec.granule, (at // codec.granule + 1) * codec.granule)
        _that(
            not bool(torch.isfinite(y[block]).all()),
            f"{what}: decoded to finite values, an overflow would be lost",
        )
        y[block] = 0
        _that(bool(torch.isfinite(y).all()), f"{what}: spread beyond its granule of {codec.granule} values")
        total = torch.zeros(n)
        codec.decode_add(payload, total, dtype)
        _that(not bool(torch.isfinite(total[block]).all()), f"{what}: lost in decode_add")
        bound = codec.error_bound(x)
        if bound is not None and not codec.lossless:
            _that(not bool(torch.isnan(bound).any()), f"{what}: error_bound is NaN")
    # Every exponent and sign with random mantissas; all values, for 16-bit dtypes.
    size = dtype.itemsize
    rng = torch.Generator().manual_seed(1)
    if size == 2:
        bits = torch.arange(-(2**15), 2**15)
    else:
        bits = torch.randint(-(2**62), 2**62, (4099,), generator=rng) >> (31 if size == 4 else 0)
    x = bits.to(INTEGERS[size]).view(dtype)
    y = decode(codec, encode(codec, x), x)
    _that(not codec.lossless or same_bits(x, y), f"{codec}, {dtype}: lossless, but a bit pattern changed")


def _check_threads(codec: Codec, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(100_003, generator=rng).to(dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            payload = encode(codec, x, seed=9)
            results.append((payload, decode(codec, payload, x)))
    finally:
        torch.set_num_threads(threads)
    (p1, y1), (p4, y4) = results
    _that(
        torch.equal(p1, p4) and same_bits(y1, y4),
        f"{codec}, {dtype}: the result depends on the number of threads",
    )


def _check_damage(codec: Codec, dtype: torch.dtype) -> None:
    """Payloads that are too short, too long or hold anything: a WireError or some values, nothing else."""
    rng = torch.Generator().manual_seed(3)
    for n in (1, 37, 1000):
        x = torch.randn(n, generator=rng).to(dtype)
        payload = encode(codec, x)
        limit = codec.max_nbytes(n, dtype)
        for size in {0, 1, payload.numel() // 2, limit + 1, 2 * limit} - {payload.numel()}:
            what = f"{codec}, {dtype}: a payload of {size} bytes for {n} values"
            damaged = torch.cat([payload, payload.new_zeros(max(0, size - payload.numel()))])[:size]
            out = x.clone()
            refused = _refused(partial(codec.decode, damaged, out), WireError)
            must = codec.fixed_size or size > limit
            _that(refused or not must, f"{what} was accepted")
        for trial in range(12):
            damaged = payload.clone()
            if trial % 2 and damaged.numel():
                where = torch.randint(0, damaged.numel(), (1 + trial // 2,), generator=rng)
                damaged[where] = torch.randint(0, 256, where.shape, generator=rng).to(torch.uint8)
            else:
                damaged = torch.randint(0, 256, damaged.shape, generator=rng).to(torch.uint8)
            guarded = torch.full((n + 16,), 3.0).to(dtype)
            _refused(partial(codec.decode, damaged, guarded[8 : 8 + n]), WireError)
            edges = torch.cat([guarded[:8], guarded[8 + n :]])
            _that(
                bool((edges == 3).all()),
                f"{codec}, {dtype}: a random payload made decode write outside of out",
            )


def _check_states(codec: Codec, dtype: torch.dtype) -> None:
    """Both ends of a stream keep step, go on from a dump, and refuse what needs a state that is not there."""
    sender, receiver = codec.new_state(), codec.new_state()
    _that((sender is not None) == codec.stateful, f"{codec}: stateful and new_state() do not agree")
    if sender is None or receiver is None:
        return
    _that(codec.lossless, f"{codec}: is stateful, but not lossless")
    rng = torch.Generator().manual_seed(4)
    for turn, n in enumerate((3000, 3000, 0, 1, 2500, 3000)):
        what = f"{codec}, {dtype}: message {turn} of a stream"
        x = torch.randn(n, generator=rng).to(dtype)
        again, other = codec.new_state(), codec.new_state()
        assert again is not None
        assert other is not None
        again.load(sender.dump())
        other.load(receiver.dump())
        payload = encode(codec, x, state=sender)
        _that(torch.equal(encode(codec, x, state=again), payload), f"{what}: other bytes from a dumped state")
        if sender.needs:
            for state in (None, codec.new_state()):
                refused = _refused(partial(codec.decode, payload, x.clone(), state=state), WireError)
                _that(refused, f"{what}: decodes without the state that it needs")
            _that(sender.needs == receiver.id, f"{what}: needs another state than the receiver has")
        _that(same_bits(decode(codec, payload, x, receiver), x), f"{what}: other values")
        _that(same_bits(decode(codec, payload, x, other), x), f"{what}: other values from a dumped state")
        _that(sender.id == receiver.id == other.id, f"{what}: the ends remember different things")
        if dtype.itemsize <= 4:
            total = torch.ones(n)
            codec.decode_add(payload, total, dtype, state=receiver)
            _that(same_bits(total, 1 + x.float()), f"{what}: decode_add differs from out + decoded")


def _check_refusals(codec: Codec, dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 64).to(dtype)
    payload = encode(codec, x)
    limit = codec.max_nbytes(64, dtype)

    def encode_refuses(label: str, source: Tensor, out: Tensor, error: type[Exception]) -> None:
        before = out.clone()
        what = f"{codec}, {dtype}: encode with {label}"
        _that(_refused(partial(codec.encode, source, out), error), f"{what} is accepted")
        _that(torch.equal(out, before), f"{what} changed out before it raised")

    def decode_refuses(label: str, source: Tensor, out: Tensor) -> None:
        before = out.clone()
        what = f"{codec}, {dtype}: decode with {label}"
        _that(_refused(partial(codec.decode, source, out), ThinwireError), f"{what} is accepted")
        _that(torch.equal(out, before), f"{what} changed out before it raised")

    room = torch.full((2 * limit + 2,), 7, dtype=torch.uint8)
    encode_refuses("integer input", torch.arange(64), room, UnsupportedError)
    encode_refuses("non-contiguous input", x.reshape(8, 8).t(), room, UnsupportedError)
    encode_refuses("non-contiguous out", x, room[::2], UnsupportedError)
    encode_refuses("out of another dtype", x, torch.zeros(limit), UnsupportedError)
    encode_refuses("out too small", x, room[: limit - 1], ValueError)
    shared = torch.zeros(limit + 64 * dtype.itemsize, dtype=torch.uint8)
    encode_refuses("out over the input", shared[: 64 * dtype.itemsize].view(dtype), shared, UnsupportedError)
    decode_refuses("integer out", payload, torch.arange(64))
    decode_refuses("non-contiguous out", payload, torch.zeros(8, 8).to(dtype).t())
    decode_refuses("payload of another dtype", payload.to(torch.int32), x.clone())
    total = torch.zeros(64, dtype=torch.float64)
    add = partial(codec.decode_add, payload, total, dtype)
    _that(_refused(add, ThinwireError), f"{codec}: decode_add to float64 is accepted")


def _refused(call: Callable[[], object], error: type[Exception]) -> bool:
    try:
        call()
    except error:
        return True
    return False


def _most(excess: Tensor) -> float:
    return float(excess.max()) if excess.numel() else 0.0


def _that(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
