"""A plain DistributedDataParallel script that knows nothing of thinwire: a small character model of Python's own sources.

torchrun --nproc-per-node 2 examples/ddp_plain.py
thinwire run --policy balanced --nproc-per-node 2 examples/ddp_plain.py
"""

import argparse
import inspect

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    """Predicts each byte from the 64 bytes before it: one causal attention layer and a feed-forward one."""

    def __init__(self, width: int = 128, context: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.zeros(context, width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens) + self.place, src_mask=self.mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()

    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()

    generator = torch.Generator().manual_seed(1 + rank)
    for step in range(options.steps):
        starts = torch.randint(len(text) - 65, (options.batch,), generator=generator)
        window = torch.stack([text[start : start + 65] for start in starts.tolist()])
        loss = cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
