"""An accelerate loop with compressed gradients: a small GPT-2 of random weights learns Python's own sources.

What thinwire adds is marked; residuals lie in the saved state. Needs ``pip install transformers accelerate``.

torchrun --nproc-per-node 2 examples/accelerate_loop.py --policy balanced
thinwire run --policy balanced --nproc-per-node 2 examples/accelerate_loop.py     # the same without the marked lines
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT = 64


def make_data(nbytes: int = 1 << 20) -> list[torch.Tensor]:
    """The standard library as bytes, cut into pieces."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n\n".join(file.read_bytes() for file in files)[:nbytes]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [piece for piece in tokens.split(CONTEXT) if len(piece) == CONTEXT]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--policy", help="a preset or a TOML file; without it the script does not know thinwire"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a rank in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--save", help="folder for the state at the end")
    parser.add_argument("--load", help="folder of a state to begin with")
    options = parser.parse_args()

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # without it accelerate does not join ranks on the CPU
        gradient_accumulation_steps=options.accumulate,
        mixed_precision=options.precision,
    )
    if options.policy:
        from thinwire.integrate.accelerate import compress  # +

        compression = compress(accelerator, options.policy)  # +
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 128, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = DataLoader(make_data(), batch_size=options.batch, shuffle=True, drop_last=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    if options.load:
        accelerator.load_state(options.load)

    step = 0
    while step < options.steps:
        for tokens in batches:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            if step % 10 == 0 or step == options.steps - 1:
                accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
            step += 1
            if step == options.steps:
                break
    if options.save:
        accelerator.save_state(options.save)
    if options.policy and accelerator.is_main_process:
        for sent in compression.stats().messages:
            print(f"{sent.op} of {sent.role}, {sent.codec}: {sent.raw_bytes / 1e6:.2f} MB raw, ", end="")
            print(f"{sent.wire_bytes / 1e6:.2f} MB on the wire, {sent.ratio:.2f} times smaller")
    accelerator.end_training()


if __name__ == "__main__":
    main()
