"""The reductions of integrations that know the parameters of a message, and what these keep from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import collectives as c
from ..codecs import Codec, Compressor, LowRank
from ..collectives.options import CallOptions
from ..collectives.transport import Metered
from ..errors import UnsupportedError
from ..feedback import Feedback, Span
from ..group import ThinwireGroup
from ..policy import AxisPolicy
from ..warm_start import WarmStart

States = tuple[Feedback | None, WarmStart | None]


def feedback_group(group: Any, caller: str, needs: str, give: str) -> ThinwireGroup:
    """``group``, if it is a thinwire one and was told that its caller runs error feedback; else UnsupportedError.

    The error says: CALLER needs NEEDS is (the group's type); GIVE, or ...
    """
    if not isinstance(group, ThinwireGroup):
        raise UnsupportedError(
            f"{caller} needs {needs} is {type(group).__name__}; {give}, or call "
            'init_process_group("thinwire", pg_options=...)'
        )
    if not group.options.feedback_by_caller:
        raise UnsupportedError(f"{caller} runs error feedback: make the group with feedback_by_caller=True")
    return group


def make_states(
    spans: Sequence[Span],
    numel: int,
    group: ThinwireGroup,
    compressor: Compressor,
    policy: AxisPolicy,
    *,
    axis: str,
    owns_chunk: bool,
    rollback: bool,
    device: torch.device,
    known: Mapping[str, Tensor] | None = None,
) -> States:
    """Residuals, if the policy asks for them, and the Q that low-rank reductions start from.

    spans: of all parameters of the flat message of ``numel`` values, with shapes. owns_chunk: it is all-reduced, so that
    codecs encode a second time, this rank's chunk. known: see :class:`~thinwire.warm_start.WarmStart`.
    """
    if group.size() == 1 or compressor.lossless:
        return None, None
    feedback = warm_start = None
    if isinstance(compressor, LowRank):
        seed = group.options.seed
        warm_start = WarmStart(
            spans, compressor, axis=axis, seed=seed, device=device, rollback=rollback, known=known
        )
    if policy.feedback:
        start = stop = 0
        if owns_chunk and isinstance(compressor, Codec):
            start, stop = c.Chunks.of(numel, group.size(), compressor.granule).bounds(group.rank())
        feedback = Feedback(
            spans, numel, axis=axis, owner_numel=stop - start, owner_begin=start, rollback=rollback
        )
    return feedback, warm_start


def all_reduce(
    flat: Tensor, compressor: Compressor, states: States, transport: Metered, options: CallOptions
) -> None:
    """Replace flat by its sum or mean over the ranks; low-rank where ``states`` say so (flat is fp32 then)."""
    feedback, warm_start = states
    if warm_start is not None:
        residual = None if feedback is None else feedback.sender
        c.low_rank_all_reduce(flat, warm_start.matrices, transport, options, residual=residual)
        return
    assert isinstance(compressor, Codec)
    residuals = None if feedback is None else c.Residuals(feedback.sender, feedback.owner)
    c.all_reduce(flat, compressor, transport, options, residuals=residuals)


def reduce_scatter(
    flat: Tensor,
    out: Tensor,
    compressor: Compressor,
    states: States,
    transport: Metered,
    options: CallOptions,
) -> None:
    """Fill out (fp32, a rank's share of flat) with this rank's part of the sum or mean over the ranks."""
    feedback, warm_start = states
    residual = None if feedback is None else feedback.sender
    if warm_start is not None:
        begin = transport.rank * out.numel()
        c.low_rank_all_reduce(
            flat, warm_start.matrices, transport, options, residual=residual, out=out, begin=begin
        )
        return
    assert isinstance(compressor, Codec)
    coded_reduce_scatter(flat, out, compressor, residual, transport, options)


def coded_reduce_scatter(
    flat: Tensor,
    out: Tensor,
    codec: Codec,
    residual: Tensor | None,
    transport: Metered,
    options: CallOptions,
) -> None:
    """Fill out (a rank's share of flat) through a codec. residual: fp32, in the order of flat; it is changed."""
    chunks = c.Chunks(flat.numel(), transport.size, out.numel())
    out.copy_(c.reduce_scatter(flat, codec, transport, chunks, options, residual=residual))
