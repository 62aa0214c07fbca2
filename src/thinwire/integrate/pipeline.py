"""Pipeline parallelism: torch's stage, whose messages say whether they are activations or gradients of them."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import pipelining

from .roles import role_tag

_ACTIVATION, _GRADIENT = role_tag("activation"), role_tag("activation_gradient")


class PipelineStage(pipelining.PipelineStage):
    """``torch.distributed.pipelining.PipelineStage`` whose sends and receives carry their role as a tag.

    All stages of a pipeline must be of this class, or none: the tags of both ends have to be the same.
    """

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _tagged(super().get_fwd_recv_ops(fwd_chunk_id), _ACTIVATION)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _tagged(super().get_fwd_send_ops(fwd_chunk_id), _ACTIVATION)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _tagged(super().get_bwd_recv_ops(bwd_chunk_id), _GRADIENT)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _tagged(super().get_bwd_send_ops(bwd_chunk_id), _GRADIENT)


def _tagged(ops: list[dist.P2POp], tag: int) -> list[dist.P2POp]:
    for op in ops:
        op.tag = tag
    return ops
