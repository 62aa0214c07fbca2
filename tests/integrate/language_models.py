"""Small language models of Hugging Face's architectures, and bytes for them to learn."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import torch
from torch import Tensor

from thinwire.policy import Policy, from_dict

CONTEXT = 32
KINDS = ("gpt2", "neox", "llama")


def make(kind: str, seed: int = 1) -> Any:
    """Some 40 000 parameters, without dropout."""
    from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig

    torch.manual_seed(seed)
    tokens = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    long = {"max_position_embeddings": CONTEXT}
    if kind == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config: Any = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=CONTEXT, **dropout, **tokens)
    else:
        config = {"neox": GPTNeoXConfig, "llama": LlamaConfig}[kind](**sizes, **long, **tokens)
    return AutoModelForCausalLM.from_config(config)


def pieces(count: int, first: int = 0) -> list[Tensor]:
    """Consecutive pieces of ASCII text, int64."""
    text = inspect.getsource(argparse).encode("ascii", "replace")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    assert (first + count) * CONTEXT <= len(tokens)
    return list(tokens[first * CONTEXT : (first + count) * CONTEXT].split(CONTEXT))


def policy(codec: str = "int4:block=32", **axes: Any) -> Policy:
    return from_dict({"axis": {"dp": {"reduce": codec, "feedback": True, "min_nbytes": 64}, **axes}}, "test")


def parameters(model: Any) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]
