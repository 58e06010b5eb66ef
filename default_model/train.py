"""Trains the default model: `python -m default_model.train --state DIR`.

Every step's data, and the order in which gradients are added, depend on the seed and the step's
number alone. So a run that was interrupted goes on from DIR/state.pt and ends with the same bits
as one that was not, on the same machine and releases. With fewer `--steps` a run that was begun
ends earlier, at a learning rate of zero too. ``--from`` goes on from a checkpoint's weights and
tokenizer, gently, for what the corpus has gained since.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from default_model.batches import Draw, microbatches, step_samples
from default_model.corpus import mixture
from default_model.encoding import render
from default_model.gradients import Replicas
from default_model.optimizer import Optimizer, learning_rate
from default_model.shape import Shape
from default_model.tokenizer import token_ids, train_tokenizer

SEED = 20261121
_TOKENIZER_TEXTS = 20_000
_SAVE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and on what is trained."""

    steps: int = 6000
    step_tokens: int = 2048
    shape: Shape = field(default_factory=Shape)
    seed: int = SEED
    draw: Draw = mixture.draw
    start: Path | None = None
    """A checkpoint to go on from."""

    @property
    def peak(self) -> float:
        """Share of the full learning rate that is reached: what is known must not be lost."""
        return 1.0 if self.start is None else 0.3


def make_tokenizer(plan: Plan, texts: int = _TOKENIZER_TEXTS) -> Tokenizer:
    """Train the tokenizer on `texts` drawn pieces of text."""
    rng = Random(f"{plan.seed}/tokenizer")
    drawn = (plan.draw(rng) for _ in range(texts))
    rendered = (d if isinstance(d, str) else render(d.messages, d.tools) for d in drawn)
    return train_tokenizer(rendered, plan.shape.vocab_size)


def new_model(shape: Shape, tokenizer: Tokenizer, seed: int) -> LlamaForCausalLM:
    """Return a model with fresh float32 weights."""
    torch.manual_seed(seed)
    # The fused kernel of attention takes a third of a step for its backward pass in bfloat16.
    ours = {"dtype": "float32", "attn_implementation": "eager"}
    config = LlamaConfig(**shape.config(token_ids(tokenizer)) | ours)
    model = LlamaForCausalLM(config)
    # A block begins as the identity: what it adds is learnt from nothing.
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


class Run:
    """A training run and the file that it can go on from."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, folder: Path) -> None:
        self.plan, self.tokenizer = plan, tokenizer
        self._file = folder / "state.pt"
        self.model = new_model(plan.shape, tokenizer, plan.seed)
        self._optimizer = Optimizer(self.model)
        self.step, self.tokens = 0, 0
        if plan.start is not None:
            weights = load_file(plan.start / "model.safetensors")
            self.model.load_state_dict(weights, strict=False)
        if self._file.exists():
            self._restore(torch.load(self._file, weights_only=True))
        self._replicas = Replicas(self.model)

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.restore(state["optimizer"])
        self.step, self.tokens = state["step"], state["tokens"]

    def save(self) -> None:
        """Write the state, whole or not at all."""
        made = self._file.with_suffix(".part")
        state = {"model": self.model.state_dict(), "optimizer": self._optimizer.state()}
        torch.save(state | {"step": self.step, "tokens": self.tokens}, made)
        made.replace(self._file)

    def advance(self) -> float:
        """Train one step and return its loss."""
        plan = self.plan
        samples = step_samples(self.tokenizer, plan.draw, plan.seed, self.step, plan.step_tokens)
        loss = self._replicas.backward(microbatches(samples))
        rate = plan.peak * learning_rate(self.step, plan.steps)
        self._optimizer.step(rate, self._replicas.pool)
        self.step += 1
        self.tokens += sum(len(sample.ids) for sample in samples)
        return loss


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def train(run: Run, say: Callable[[str], object]) -> None:
    """Advance to the end; tell loss, speed and what is left every 20 steps."""
    began = saved = time.monotonic()
    first, last, mean = run.step, run.plan.steps, None
    while run.step < last:
        loss = run.advance()
        mean = loss if mean is None else 0.95 * mean + 0.05 * loss
        now = time.monotonic()
        if run.step % 20 == 0 or run.step == last:
            left = (last - run.step) * (now - began) / (run.step - first)
            say(f"step {run.step}/{last}  loss {mean:.3f}  {run.tokens / 1e6:.2f}M tokens  "
                f"{_minutes(left)} left\n")  # fmt: skip
        if now - saved > _SAVE_SECONDS:
            run.save()
            saved = now
    run.save()


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m default_model.train", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="folder of the run")
    parser.add_argument("--steps", type=int, default=Plan().steps)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--from", type=Path, dest="start", help="checkpoint to go on from")
    options = parser.parse_args()
    options.state.mkdir(parents=True, exist_ok=True)
    plan = Plan(steps=options.steps, seed=options.seed, start=options.start)
    path = options.state / "tokenizer.json"
    if plan.start is not None:
        path.write_bytes((plan.start / "tokenizer.json").read_bytes())
    elif not path.exists():
        path.write_text(make_tokenizer(plan).to_str(pretty=False) + "\n", encoding="utf-8")
    run = Run(plan, Tokenizer.from_file(str(path)), options.state)

    def say(line: str) -> None:
        sys.stdout.write(line)
        sys.stdout.flush()

    say(
        f"{sum(p.numel() for p in run.model.parameters()) / 1e6:.2f}M parameters, step {run.step}\n"
    )
    train(run, say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
