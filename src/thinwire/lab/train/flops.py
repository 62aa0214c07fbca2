"""What a step costs on paper: parameters, floating-point operations and messages of any model and layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .model import ModelConfig, Slot, block_slots, embedding_slots, head_slots


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model."""
    return (
        _numel(embedding_slots(model)) + model.layers * _numel(block_slots(model)) + _numel(head_slots(model))
    )


def step_flops(model: ModelConfig, sequences: int) -> int:
    """Floating-point operations of one step over ``sequences`` sequences, forward and backward.

    6 per parameter and token (the embedding is looked up, not multiplied, and does not count), and 6 x hidden x
    sequence per token and layer for attention scores and values: the half that a causal mask leaves. (Narayanan
    et al. 2021, appendix, without recomputation.)
    """
    tokens = sequences * model.sequence
    multiplied = parameter_count(model) - _numel(embedding_slots(model))
    return 6 * multiplied * tokens + 6 * model.layers * model.hidden * model.sequence * tokens


@dataclass(frozen=True)
class Message:
    """What one rank puts into a collective, ``count`` times per step.

    nbytes: of the tensor handed over: the full input of a reduce, the full output of a gather. Raw bytes on the
    wire follow from it and the algorithm.
    """

    axis: str
    op: str
    role: str
    count: int
    nbytes: int


def step_messages(
    model: ModelConfig,
    *,
    dp: int,
    tp: int,
    pp: int,
    micro_batch: int,
    micro_batches: int,
    zero: int = 1,
    element_bytes: int = 4,
    gradient_bytes: int = 4,
) -> list[Message]:
    """The large messages of a rank in the middle of the pipeline, one stage per rank.

    element_bytes: of activations and parameters; gradient_bytes: of gradients. The layers are taken as evenly split
    and the embedding and head as shared evenly by the stages; loss statistics and other small messages are left out.
    """
    activation = micro_batch * model.sequence * model.hidden * element_bytes
    parameters = math.ceil(parameter_count(model) / (tp * pp))
    layers = math.ceil(model.layers / pp)
    messages = []
    if tp > 1:
        for role in ("activation", "activation_gradient"):
            messages.append(Message("tp", "all_reduce", role, layers * micro_batches, activation))
    if pp > 1:
        messages.append(Message("pp", "send", "activation", micro_batches, activation))
        messages.append(Message("pp", "send", "activation_gradient", micro_batches, activation))
    if dp > 1 and zero == 0:
        messages.append(Message("dp", "all_reduce", "gradient", 1, parameters * gradient_bytes))
    if dp > 1 and zero > 0:
        # FSDP with parameters resharded after the forward pass gathers them again for the backward pass.
        gathers = {1: 1, 2: 1, 3: 2 * micro_batches}[zero]
        messages.append(Message("dp", "reduce_scatter", "gradient", 1, parameters * gradient_bytes))
        messages.append(Message("zero", "all_gather", "parameter", gathers, parameters * element_bytes))
    return messages


def _numel(slots: dict[str, Slot]) -> int:
    return sum(math.prod(slot.shape) for slot in slots.values())
