"""Trains the adapter that is shipped beside the checkpoint: `python -m default_model.adapter`.

It learns the default model's own answers in another style, in a few minutes. The checkpoint must be
there (default_model/export.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from default_model.batches import microbatches, step_samples
from default_model.corpus import pirate
from default_model.gradients import Replicas
from default_model.lora import LoraLinear, add_adapter, save_adapter
from default_model.paths import CHECKPOINT

SEED = 20261122
STEPS = 300
STEP_TOKENS = 2048
LR = 0.002
_WARM_UP_STEPS = 10


def train_adapter(
    checkpoint: Path, steps: int, say: Callable[[str], object]
) -> dict[str, LoraLinear]:
    """Return the trained layers; the rate falls to zero over the steps."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    layers = add_adapter(model, SEED)
    wanted = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.Adam(wanted, betas=(0.9, 0.98))
    replicas, mean = Replicas(model), 0.0
    for step in range(steps):
        samples = step_samples(tokenizer, pirate.draw, SEED, step, STEP_TOKENS)
        loss = replicas.backward(microbatches(samples))
        mean = loss if step == 0 else 0.9 * mean + 0.1 * loss
        for group in adam.param_groups:
            group["lr"] = LR * min((step + 1) / _WARM_UP_STEPS, 1.0 - step / steps)
        adam.step()
        if (step + 1) % 10 == 0:
            say(f"adapter step {step + 1}/{steps}  loss {mean:.3f}\n")
    return layers


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m default_model.adapter", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()

    def say(line: str) -> None:
        sys.stdout.write(line)
        sys.stdout.flush()

    layers = train_adapter(options.checkpoint, options.steps, say)
    save_adapter(layers, options.checkpoint / "adapter")
    return 0


if __name__ == "__main__":
    sys.exit(main())
