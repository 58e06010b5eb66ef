"""Writes tiny random checkpoints whose greedy continuations are worth comparing.

The weights are scaled so that next-token logits have a standard deviation of about 4; dummy
weights as engines make them give about 1e-6, where every rounding error changes the chosen token.
Norm weights and biases are random too, so that a kernel that forgets one gives other tokens.
transformers loads the same tokenizer files for qwen2 with that family's splitting of numbers.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint_families import FAMILIES
from tests.checkpoint_tokenizer import tokenizer_files, train_tokenizer
from tests.checkpoint_weights import randomise


@cache
def _tokenizer_files(max_length: int) -> dict[str, bytes]:
    return tokenizer_files(train_tokenizer(), max_length)


def make_checkpoint(
    arch: str, path: Path, *, dtype: str = "float32", seed: int = 0, **config_overrides: Any
) -> Path:
    """Write a checkpoint with the tokenizer of checkpoint_tokenizer.py into `path`.

    `arch` is a name of `FAMILIES`, `dtype` a torch dtype name ("float32", "bfloat16", "float16");
    `config_overrides` replace fields of the Hugging Face configuration. Returns `path`.
    """
    family = FAMILIES[arch]
    config = family.config(**config_overrides)
    model = family.model(config)
    randomise(model, family, seed)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    for name, content in _tokenizer_files(config.max_position_embeddings).items():
        (path / name).write_bytes(content)
    return path


@cache
def _builder_digest() -> str:
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for source in (*sorted(here.glob("checkpoint*.py")), *sorted(here.glob("checkpoint_text/*"))):
        digest.update(source.read_bytes())
    digest.update(f"{torch.__version__} {version('transformers')}".encode())
    return digest.hexdigest()[:16]


class CheckpointCache:
    """Makes each checkpoint once for a user and builder source, and hands out its folder.

    Safe between processes: a checkpoint is built beside its place and renamed into it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root / _builder_digest()
        self._root.mkdir(parents=True, exist_ok=True)

    def __call__(
        self, arch: str, *, dtype: str = "float32", seed: int = 0, **config_overrides: Any
    ) -> Path:
        """Return the read-only folder of the checkpoint that make_checkpoint would write."""
        options = repr((dtype, seed, sorted(config_overrides.items())))
        place = self._root / f"{arch}-{hashlib.sha256(options.encode()).hexdigest()[:12]}"
        if place.exists():
            return place
        building = Path(tempfile.mkdtemp(prefix="building-", dir=self._root))
        make_checkpoint(arch, building, dtype=dtype, seed=seed, **config_overrides)
        try:
            building.rename(place)
        except OSError:
            # Another process was first; its copy is the same.
            shutil.rmtree(building)
        return place
