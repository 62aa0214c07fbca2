"""Hugging Face's Trainer with compressed gradients: a small model of random weights learns Python's own sources.

What thinwire adds is marked; residuals lie in the Trainer's checkpoints (``--resume`` goes on from the last one). Needs
``pip install transformers accelerate``.

torchrun --nproc-per-node 2 examples/hf_trainer.py --policy balanced
thinwire run --policy balanced --nproc-per-node 2 examples/hf_trainer.py     # the same without the marked lines
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)

CONTEXT = 64


def make_model(kind: str) -> torch.nn.Module:
    """0.5 million parameters; a token is a byte."""
    tokens = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    long = {"max_position_embeddings": CONTEXT}
    config = {
        "gpt2": lambda: GPT2Config(n_embd=128, n_layer=2, n_head=4, n_positions=CONTEXT, **tokens),
        "neox": lambda: GPTNeoXConfig(intermediate_size=512, **sizes, **long, **tokens),
        "llama": lambda: LlamaConfig(intermediate_size=384, **sizes, **long, **tokens),
    }[kind]()
    return AutoModelForCausalLM.from_config(config)


def make_data(nbytes: int = 1 << 20) -> list[dict[str, torch.Tensor]]:
    """The standard library, cut into pieces."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n\n".join(file.read_bytes() for file in files)[:nbytes]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": piece, "labels": piece} for piece in tokens.split(CONTEXT) if len(piece) == CONTEXT]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("gpt2", "neox", "llama"), default="gpt2")
    parser.add_argument(
        "--policy", help="a preset or a TOML file; without it the script does not know thinwire"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a rank in a step")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches that they are cut into")
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--out", default="out/hf_trainer", help="folder for checkpoints")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    trainer = Trainer(
        model=make_model(options.model),
        args=TrainingArguments(
            output_dir=options.out,
            use_cpu=not torch.cuda.is_available(),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch // options.accumulate,
            gradient_accumulation_steps=options.accumulate,
            bf16=options.bf16,
            learning_rate=2e-3,
            logging_steps=10,
            save_steps=20,
            save_total_limit=2,
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=make_data(),
    )
    if options.policy:
        from thinwire.integrate.transformers import compress  # +

        compression = compress(trainer, options.policy)  # +
    trainer.train(resume_from_checkpoint=options.resume)
    if options.policy and trainer.is_world_process_zero():
        for sent in compression.stats().messages:
            print(f"{sent.op} of {sent.role}, {sent.codec}: {sent.raw_bytes / 1e6:.2f} MB raw, ", end="")
            print(f"{sent.wire_bytes / 1e6:.2f} MB on the wire, {sent.ratio:.2f} times smaller")


if __name__ == "__main__":
    main()
