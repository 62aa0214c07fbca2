"""FSDP2 with compressed gradients and parameters: what changes is marked.

torchrun --nproc-per-node 2 examples/fsdp.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import thinwire  # +


def main() -> None:
    options = thinwire.GroupOptions(policy="balanced", feedback_by_caller=True)  # +
    dist.init_process_group("thinwire", pg_options=options)  # was: "gloo"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    compression = thinwire.compress_fsdp(model, residual_dtype=torch.bfloat16)  # +
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        x = torch.randn(32, 256, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    if dist.get_rank() == 0:
        group = dist.group.WORLD
        assert isinstance(group, thinwire.ThinwireGroup)
        for message, entry in group.traffic.entries().items():
            raw, wire = entry.raw_bytes / 1e6, entry.tally.wire_bytes / 1e6
            print(
                f"{message.op} of {message.role}, {message.codec}: {raw:.2f} MB raw, {wire:.2f} MB on the wire"
            )
        print(f"residuals: {compression.nbytes / 1e6:.2f} MB on every rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
