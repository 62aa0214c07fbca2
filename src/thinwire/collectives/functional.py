"""Compressed collectives over any ``torch.distributed`` group, for code that calls them itself.

::

    work = thinwire.all_reduce(grad, "int4:block=128", group, op="mean", async_op=True)
    work.wait()

The group's own order of calls is used for the frames: while an asynchronous call is under way, the group
must not be used for anything else. (A :class:`~thinwire.group.ThinwireGroup` has no such limit.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary, finalize, proxy

import torch
import torch.distributed as dist
from torch import Tensor

from ..codecs import Codec, parse
from ..errors import UnsupportedError
from . import all_gather as _all_gather
from . import all_reduce as _all_reduce
from . import all_to_all as _all_to_all
from . import broadcast as _broadcast
from . import recv as _recv
from . import reduce_scatter as _reduce_scatter
from . import send as _send
from .endpoint import Endpoint
from .frames import Chunks, equal_parts
from .options import CallOptions
from .torch_transport import TorchTransport
from .traffic import Message, Traffic, raw_nbytes
from .transport import Metered
from .work import Work

Reduction = Literal["sum", "mean"]
_DEFAULTS = CallOptions()
_endpoints: WeakKeyDictionary[dist.ProcessGroup, Endpoint] = WeakKeyDictionary()


def endpoint(group: dist.ProcessGroup | None = None) -> Endpoint:
    """The endpoint of a group (None: the default one); made on first use."""
    real = group if group is not None else dist.group.WORLD
    if real is None:
        raise UnsupportedError("there is no default process group; call init_process_group first")
    found = _endpoints.get(real)
    if found is None:
        # A proxy: the endpoint must not keep its group alive, and its threads end with the group.
        kinds = {device.type for device in real._device_types}
        device = torch.device("cpu" if "cpu" in kinds or not kinds else min(kinds))
        found = _endpoints[real] = Endpoint(TorchTransport(proxy(real)), device=device)
        finalize(real, found.close)
    return found


def traffic(group: dist.ProcessGroup | None = None) -> Traffic:
    """What the functions of this module have sent over a group."""
    return endpoint(group).traffic


def all_reduce(
    x: Tensor,
    codec: Codec | str,
    group: dist.ProcessGroup | None = None,
    *,
    op: Reduction = "sum",
    async_op: bool = False,
    options: CallOptions = _DEFAULTS,
) -> Work | None:
    """Replace x by its sum or mean over the ranks; fp32 accumulation, the same bits on every rank.

    x: contiguous float tensor of any shape. options: seed, algorithm, segments. Returns a Work if async_op.
    Raises UnsupportedError, SpecError, and PeerError if a peer is lost.
    """
    parsed = parse(codec)
    flat = _flat(x, parsed)
    options = _with_mean(options, op)
    return _start("all_reduce", x, parsed, group, async_op, lambda t: _all_reduce(flat, parsed, t, options))


def reduce_scatter(
    out: Tensor,
    x: Tensor,
    codec: Codec | str,
    group: dist.ProcessGroup | None = None,
    *,
    op: Reduction = "sum",
    async_op: bool = False,
    options: CallOptions = _DEFAULTS,
) -> Work | None:
    """Fill out (numel of x / size) with the sum or mean over the ranks of this rank's part of x."""
    parsed = parse(codec)
    flat, target = _flat(x, parsed), _flat(out, parsed)
    options = _with_mean(options, op)
    chunks = Chunks(flat.numel(), endpoint(group).size, target.numel())
    if chunks.length * chunks.size != chunks.numel:
        raise UnsupportedError(
            f"reduce_scatter: input of {flat.numel()} values, {chunks.size} outputs of {target.numel()}"
        )

    def call(transport: Metered) -> None:
        target.copy_(_reduce_scatter(flat, parsed, transport, chunks, options))

    return _start("reduce_scatter", x, parsed, group, async_op, call)


def all_gather(
    out: Tensor,
    x: Tensor,
    codec: Codec | str,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: bool = False,
    options: CallOptions = _DEFAULTS,
) -> Work | None:
    """Fill out (numel of x * size) with every rank's x, as it was decoded, in rank order."""
    parsed = parse(codec)
    flat, target = _flat(x, parsed), _flat(out, parsed)
    size = endpoint(group).size
    if flat.numel() * size != target.numel():
        raise UnsupportedError(
            f"all_gather: {size} inputs of {flat.numel()} values, output of {target.numel()}"
        )
    outs = equal_parts(target, size)
    return _start(
        "all_gather",
        out,
        parsed,
        group,
        async_op,
        lambda t: _all_gather(flat, outs, parsed, t, options),
    )


def broadcast(
    x: Tensor,
    codec: Codec | str,
    src: int,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: bool = False,
    options: CallOptions = _DEFAULTS,
) -> Work | None:
    """Replace x by group rank src's, as it was decoded, on every rank, src included."""
    parsed = parse(codec)
    flat = _flat(x, parsed)
    return _start(
        "broadcast", x, parsed, group, async_op, lambda t: _broadcast(flat, parsed, t, src, options)
    )


def all_to_all(
    outs: list[Tensor],
    ins: list[Tensor],
    codec: Codec | str,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: bool = False,
    options: CallOptions = _DEFAULTS,
) -> Work | None:
    """Fill ``outs[p]`` with what rank p had for this rank in its ins; sizes may differ."""
    parsed = parse(codec)
    sources, targets = [_flat(x, parsed) for x in ins], [_flat(x, parsed) for x in outs]
    whole = torch.empty(sum(x.numel() for x in ins), dtype=ins[0].dtype, device="meta")
    return _start(
        "all_to_all",
        whole,
        parsed,
        group,
        async_op,
        lambda t: _all_to_all(sources, targets, parsed, t, options),
    )


def send(
    x: Tensor, codec: Codec | str, dst: int, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> Work | None:
    """Send x to group rank dst."""
    parsed = parse(codec)
    flat = _flat(x, parsed)
    queue = f"send-{dst}"
    return _start("send", x, parsed, group, async_op, lambda t: _send(flat, parsed, t, dst), queue)


def recv(
    x: Tensor, codec: Codec | str, src: int, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> Work | None:
    """Fill x with the next tensor that group rank src sends."""
    parsed = parse(codec)
    flat = _flat(x, parsed)
    queue = f"recv-{src}"
    return _start("recv", x, parsed, group, async_op, lambda t: _recv(flat, parsed, t, src), queue)


def _start(
    op: str,
    x: Tensor,
    codec: Codec,
    group: dist.ProcessGroup | None,
    async_op: bool,
    call: Callable[[Metered], None],
    queue: str = "collectives",
) -> Work | None:
    end = endpoint(group)
    nbytes = x.numel() * x.element_size()
    message = Message("", op, "unknown", str(codec), str(x.dtype).removeprefix("torch."), nbytes)
    result: Any = x
    work = end.submit(message, raw_nbytes(op, nbytes, end.size), call, result, queue)
    if async_op:
        return work
    work.wait()
    return None


def _flat(x: Tensor, codec: Codec) -> Tensor:
    # Here and not in the worker: an error there leaves the peers waiting.
    codec._check_tensor(x, "a tensor of a collective")
    return x.detach().view(-1)


def _with_mean(options: CallOptions, op: Reduction) -> CallOptions:
    if op not in ("sum", "mean"):
        raise UnsupportedError(
            f'op {op!r} cannot be compressed; use "sum" or "mean", or torch.distributed for others'
        )
    return replace(options, mean=op == "mean")
