"""A plain training loop with compressed gradients: what changes is marked.

torchrun --nproc-per-node 2 examples/loop.py
"""

import torch
import torch.distributed as dist

import thinwire  # +


def main() -> None:
    dist.init_process_group("gloo")
    mesh = thinwire.init_mesh({"dp": dist.get_world_size()}, policy="balanced")  # +
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    sync = thinwire.GradientSync(model.named_parameters(), mesh.get_group("dp"))  # +
    optimizer = torch.optim.AdamW(sync.masters(), lr=1e-3)  # was: model.parameters()

    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        x = torch.randn(32, 256, generator=generator)
        sync.start()  # +
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()  # gradients travel while this runs
        sync.finish()  # was: all-reduce every gradient
        optimizer.step()
        sync.gather()  # +
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    if dist.get_rank() == 0:
        for axis, sent in thinwire.groups(mesh)["dp"].traffic.by_axis().items():
            print(
                f"{axis}: {sent['raw_bytes'] / 1e6:.1f} MB raw, {sent['wire_bytes'] / 1e6:.1f} MB on the wire"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
