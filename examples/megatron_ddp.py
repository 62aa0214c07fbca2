"""Megatron-core's DistributedDataParallel on CPUs, in a script that knows nothing of thinwire.

thinwire run --policy examples/without_feedback.toml --nproc-per-node 2 examples/megatron_ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn

if not torch.cuda.is_available():
    # Megatron-core asks for it where it makes its gradient buffers, whatever the model's device.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig


def main() -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
    config = TransformerConfig(num_layers=1, hidden_size=128, num_attention_heads=4)
    buckets = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=40_000)
    model = DistributedDataParallel(config, buckets, module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        x = torch.randn(16, 128, generator=generator)
        model.zero_grad_buffer()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        model.finish_grad_sync()
        for parameter in module.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        if dist.get_rank() == 0 and (step % 5 == 0 or step == 19):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
