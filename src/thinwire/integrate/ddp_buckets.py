"""Which parameters DistributedDataParallel reduces together: told before a step, and given back after a resume.

The one place that reads what PyTorch keeps to itself. Of torch 2.11 to 2.13.

Block codecs see a bucket as one message, so the bits of a step depend on its buckets; and DDP makes them anew after the
first step of a process, in the order in which gradients have come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def reduced(model: DistributedDataParallel) -> list[Tensor]:
    """The parameters whose gradients DDP reduces: all that are trained, but for those that it was told to ignore."""
    ddp: Any = model
    parameters: list[Tensor] = ddp._build_params_for_reducer()[0]
    return parameters


def rebuilt(model: DistributedDataParallel) -> list[list[Tensor]] | None:
    """The parameters of the next step's buckets, if DDP would make them anew at its beginning; they are then. Else None.

    All ranks call it, between steps: they agree on the order of rank 0.
    """
    reducer: Any = model.reducer
    if not reducer._rebuild_buckets():
        return None
    return [list(bucket.parameters()) for bucket in reducer._get_zeros_like_grad_buckets()]


def begin_with(model: DistributedDataParallel, buckets: Sequence[Sequence[Tensor]]) -> None:
    """Let the next step have these buckets: all trained parameters, each once. The model's hook stays.

    DDP takes buckets only by sizes, so what computes them from sizes is replaced for the time of one call.
    """
    ddp: Any = model
    c10d: Any = dist
    parameters, sparse = ddp._build_params_for_reducer()
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    indices = [[numbers[id(parameter)] for parameter in bucket] for bucket in buckets]
    sizes = [sum(parameter.nbytes for parameter in bucket) for bucket in buckets]
    original = c10d._compute_bucket_assignment_by_size
    # It answers in the order of the forward pass, and DDP turns that around.
    c10d._compute_bucket_assignment_by_size = lambda *_: (indices[::-1], sizes[::-1])
    try:
        ddp._remove_autograd_hooks()
        ddp._ddp_init_helper(
            parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph
        )
    finally:
        c10d._compute_bucket_assignment_by_size = original
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        c10d._register_comm_hook(ddp.reducer, state, hook)
