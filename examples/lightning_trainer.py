"""Lightning's Trainer with compressed gradients: a small GPT on the sources of Python's standard library.

python examples/lightning_trainer.py                                # Lightning starts the two ranks
torchrun --nproc-per-node 2 examples/lightning_trainer.py
thinwire run --policy balanced --nproc-per-node 2 examples/lightning_trainer.py --plain   # a script without thinwire's line
"""

import argparse
import logging
import sysconfig
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrate.lightning import ThinwireStrategy  # +


class GPT(lightning.LightningModule):
    """Predicts each byte from the ones before it."""

    def __init__(self, width: int = 128, layers: int = 2, context: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.zeros(context, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        windows = batch[0].long()
        loss = cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def windows(length: int, nbytes: int = 1 << 20) -> Tensor:
    """(windows, length) bytes of Python's own sources."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n\n".join(file.read_bytes() for file in files)[:nbytes]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // length * length].view(
        -1, length
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true", help="Lightning's own strategy")
    parser.add_argument("--policy", default="balanced")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--precision", default="32-true", help="for instance bf16-mixed")
    parser.add_argument("--accumulate", type=int, default=1, metavar="BATCHES", help="batches a step")
    parser.add_argument("--folder", default="lightning_logs", help="for metrics and checkpoints")
    parser.add_argument("--resume", metavar="FILE.ckpt")
    options = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        strategy="ddp" if options.plain else ThinwireStrategy(policy=options.policy),  # was: "ddp"
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.steps,
        precision=options.precision,
        accumulate_grad_batches=options.accumulate,
        default_root_dir=options.folder,
        logger=lightning.pytorch.loggers.CSVLogger(options.folder, name=None, version=""),
        log_every_n_steps=10,
        enable_progress_bar=False,
    )
    data = DataLoader(TensorDataset(windows(65)), batch_size=16, shuffle=True)
    trainer.fit(GPT(), data, ckpt_path=options.resume)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
