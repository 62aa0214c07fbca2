"""The model against a slow, plain GPT-NeoX, and the split loss against torch's."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from train_runs import PRELOAD

from thinwire.lab.train.flops import parameter_count
from thinwire.lab.train.initial import full_parameter
from thinwire.lab.train.model import ModelConfig, Stage
from thinwire.lab.train.tensor_parallel import TensorAxis, cross_entropy
from thinwire.launch import run_ranks

CONFIG = ModelConfig.preset("tiny")


def make_stage(layers: range = range(CONFIG.layers)) -> Stage:
    return Stage(CONFIG, layers, TensorAxis(), 0, torch.float32)


def plain_rotary(x: Tensor) -> Tensor:
    """x: (sequence, head_size); dimension i pairs with i + size / 2."""
    size = CONFIG.rotary_size
    out = x.clone()
    for position in range(len(x)):
        for i in range(size // 2):
            angle = position * 10000 ** (-2 * i / size)
            a, b = x[position, i], x[position, i + size // 2]
            out[position, i] = a * math.cos(angle) - b * math.sin(angle)
            out[position, i + size // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def plain_model(p: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits of one sequence."""
    x = p["embedding.weight"][tokens]
    size = CONFIG.head_size
    mask = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=x.dtype).triu(1)
    for layer in range(CONFIG.layers):
        w = {k.removeprefix(f"blocks.{layer}."): v for k, v in p.items()}
        normed = F.layer_norm(x, x.shape[-1:], w["norm1_weight"], w["norm1_bias"])
        qkv = normed @ w["qkv_weight"].T + w["qkv_bias"]
        heads = []
        for head in qkv.split(3 * size, dim=1):
            q, k, v = head.split(size, dim=1)
            scores = plain_rotary(q) @ plain_rotary(k).T / math.sqrt(size) + mask
            heads.append(scores.softmax(-1) @ v)
        attention = torch.cat(heads, 1) @ w["dense_weight"].T + w["dense_bias"]
        normed = F.layer_norm(x, x.shape[-1:], w["norm2_weight"], w["norm2_bias"])
        mlp = F.gelu(normed @ w["up_weight"].T + w["up_bias"]) @ w["down_weight"].T + w["down_bias"]
        x = x + attention + mlp
    x = F.layer_norm(x, x.shape[-1:], p["head.norm_weight"], p["head.norm_bias"])
    return x @ p["head.output_weight"].T


def test_the_model_is_gpt_neox() -> None:
    stage = make_stage()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stage.parameters():  # biases and norms away from 0 and 1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    tokens = torch.randint(CONFIG.vocab, (2, CONFIG.sequence), generator=generator)
    expected = torch.stack(
        [plain_model({k: v.double() for k, v in stage.named_parameters()}, row) for row in tokens]
    )
    # fp32 against fp64 through 4 layers; logits are of order 1.
    torch.testing.assert_close(stage(tokens).double(), expected, rtol=1e-4, atol=1e-4)


def test_stages_share_out_the_parameters() -> None:
    whole = dict(make_stage().named_parameters())
    parts = [make_stage(range(1)), make_stage(range(1, 3)), make_stage(range(3, 4))]
    named = [item for part in parts for item in part.named_parameters()]
    assert sorted(name for name, _ in named) == sorted(whole)
    assert all(torch.equal(p, whole[name]) for name, p in named)
    assert sum(p.numel() for p in whole.values()) == parameter_count(CONFIG)
    assert set(make_stage().shards) == set(whole)


def test_initial_values_depend_on_seed_and_name_only() -> None:
    a = full_parameter("a", (64, 64), 0.5, seed=3)
    assert torch.equal(a, full_parameter("a", (64, 64), 0.5, seed=3))
    assert not torch.equal(a, full_parameter("b", (64, 64), 0.5, seed=3))
    assert not torch.equal(a, full_parameter("a", (64, 64), 0.5, seed=4))
    assert abs(float(a.std()) - 0.5) < 0.5 * 4 / math.sqrt(2 * a.numel())  # 4 standard errors


def _problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 5, 12, generator=generator) * 10
    return logits, torch.randint(12, (2, 5), generator=generator)


def test_cross_entropy_of_one_rank_is_torchs() -> None:
    logits, targets = _problem()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = cross_entropy(ours, targets, TensorAxis())
    expected = F.cross_entropy(theirs.flatten(0, 1), targets.flatten())
    loss.mul(3).backward()
    expected.mul(3).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


def _split_loss(rank: int, world: int, report: Any) -> tuple[float, list[Any]]:
    logits, targets = _problem()
    axis = TensorAxis.of(init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    part = axis.slice(logits, 2).requires_grad_()
    loss = cross_entropy(part, targets, axis)
    loss.backward()
    assert part.grad is not None
    return loss.item(), part.grad.tolist()


def test_split_cross_entropy_is_the_whole_one() -> None:
    logits, targets = _problem()
    logits.requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    results = run_ranks(_split_loss, 3, timeout=60, preload=PRELOAD)
    assert len({loss for loss, _ in results}) == 1
    torch.testing.assert_close(torch.tensor(results[0][0]), expected.detach())
    torch.testing.assert_close(torch.cat([torch.tensor(g) for _, g in results], 2), logits.grad)
