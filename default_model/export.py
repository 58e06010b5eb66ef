"""Writes the checkpoint of a training run: `python -m default_model.export --state DIR`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from default_model.paths import CHECKPOINT
from default_model.shape import Shape
from default_model.tokenizer import token_ids, tokenizer_config


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(state: Path, out: Path, shape: Shape) -> None:
    """Write tokenizer, configuration and bfloat16 weights of the run in `state` into `out`.

    `training.json` tells how far the run went. The output head is the embedding, and not repeated.
    """
    out.mkdir(parents=True, exist_ok=True)
    saved = torch.load(state / "state.pt", weights_only=True)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in saved["model"].items()
        if name != "lm_head.weight"
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    text = (state / "tokenizer.json").read_text(encoding="utf-8")
    (out / "tokenizer.json").write_text(text, encoding="utf-8")
    ids = token_ids(Tokenizer.from_str(text))
    _write(out / "tokenizer_config.json", tokenizer_config(shape.max_position_embeddings))
    _write(out / "generation_config.json", ids)
    _write(out / "config.json", shape.config(ids))
    _write(out / "training.json", {"steps": saved["step"], "tokens": saved["tokens"]})


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m default_model.export", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    options = parser.parse_args()
    export(options.state, options.out, Shape())
    return 0


if __name__ == "__main__":
    sys.exit(main())
