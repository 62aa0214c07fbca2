"""A DeepSpeed script that knows nothing of thinwire: ZeRO-1 or 2 on CPUs.

export DS_ACCELERATOR=cpu
thinwire run --policy examples/without_feedback.toml --nproc-per-node 2 examples/deepspeed_zero.py --stage 2
"""

import argparse

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import nn

# On CPUs DeepSpeed compiles an op for inference when it starts, which takes minutes; training has no use for it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1, choices=(1, 2))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": options.stage},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(options.steps):
        x = torch.randn(16, 128, generator=generator)
        loss = (engine(x) - x.roll(1, 1)).square().mean()
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0 and (step % 5 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
