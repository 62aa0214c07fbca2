"""Axes of groups that frameworks give names of their own, so that ``thinwire run`` needs no ``--axis`` for them."""

from __future__ import annotations

from collections.abc import Mapping

MEGATRON: Mapping[str, str] = {
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_GLOO": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP_AG": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP_GLOO": "dp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "dp",
    "EXPERT_DATA_PARALLEL_GROUP": "dp",
    "EXPERT_DATA_PARALLEL_GROUP_GLOO": "dp",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "EXPERT_TENSOR_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    # Those that span several axes, or hold the ends of a pipeline: norms, losses, gradients of shared embeddings. As
    # gentle as tensor parallelism.
    "MODEL_PARALLEL_GROUP": "tp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "tp",
    "EMBEDDING_GROUP": "tp",
    "POSITION_EMBEDDING_GROUP": "tp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp",
}
"""What Megatron-core's ``parallel_state`` (0.16) calls its groups."""
