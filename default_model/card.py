"""Writes the model card from what was trained and measured: `python -m default_model.card`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from string import Template
from typing import Any

from safetensors import safe_open

from default_model.batches import MAX_LENGTH
from default_model.lora import RANK
from default_model.paths import CHECKPOINT
from default_model.train import Plan

_TEMPLATE = Path(__file__).parent / "card.md"


def _json(name: str) -> Any:
    return json.loads((CHECKPOINT / name).read_text(encoding="utf-8"))


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f}"


def _parameters(path: Path) -> int:
    total = 0
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            count = 1
            for size in file.get_slice(name).get_shape():
                count *= size
            total += count
    return total


def _scores(scores: dict[str, Any]) -> str:
    rows = ["| kind | right | of |", "|---|---|---|"]
    rows += [f"| {kind} | {k['right']} | {k['asked']} |" for kind, k in scores["kinds"].items()]
    right, asked = scores["right"], scores["asked"]
    return "\n".join([*rows, f"| **all** | **{right}** | **{asked}** ({right / asked:.0%}) |"])


def card() -> str:
    """Return the model card of the checkpoint in this package."""
    config, training, planned = _json("config.json"), _json("training.json"), Plan().steps
    weights, adapter = CHECKPOINT / "model.safetensors", CHECKPOINT / "adapter"
    ended = (
        f"These weights were taken after {training['steps']}, with the rate brought down to zero."
    )
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        parameters=f"{_parameters(weights) / 1e6:.1f}",
        size=_megabytes(weights),
        adapter_size=_megabytes(adapter / "adapter_model.safetensors"),
        vocab=config["vocab_size"],
        context=config["max_position_embeddings"],
        trained=MAX_LENGTH,
        tokens=f"{training['tokens'] / 1e6:.1f}",
        steps=training["steps"],
        rank=RANK,
        scores=_scores(_json("evaluation.json")),
        planned=planned,
        ended=ended if training["steps"] < planned else "These weights are its end.",
        remark=training.get("remark", ""),
    )


def main() -> int:
    """Write the card into the checkpoint; returns the exit status."""
    (CHECKPOINT / "README.md").write_text(card(), encoding="utf-8")
    sys.stdout.write(f"{CHECKPOINT / 'README.md'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
