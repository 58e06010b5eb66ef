"""Whole draft models: the served one itself, and smaller ones of random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.checkpoints import make_checkpoint
from tests.reference import reference_generate

SMALLER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 48,
}
"""Fields of a model whose layers, heads and widths are not those of the tests' served models."""


def same_model(
    folder: Path,
    served: Path,
    texts: Sequence[Sequence[int]],
    *,
    last: int | None = None,
) -> Path:
    """Return the checkpoint ``served``, whose drafts are right in every text."""
    return served


def random_model(folder: Path, served: Path, *, arch: str | None = None, **fields: Any) -> Path:
    """Write a model with random weights, whose drafts are wrong; ``arch``: a smaller one of it.

    Without ``arch`` the Llama of the tests with other weights.
    """
    if arch is None:
        return make_checkpoint("llama", folder / "own", seed=9)
    # vLLM's Qwen2 has heads that are parts of its width.
    width = {"hidden_size": 96} if arch == "qwen2" else {}
    return make_checkpoint(arch, folder / "own", seed=9, **SMALLER | width | fields)


class WholeReference:
    """transformers' drafts of the model in ``own``."""

    def __init__(self, served: Path, own: Path) -> None:
        self._own = own

    def drafts(self, text: Sequence[int], count: int) -> list[int]:
        """Return the ``count`` tokens that continue ``text`` greedily."""
        return reference_generate(self._own, text, count).token_ids
