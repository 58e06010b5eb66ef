"""Writes tiny random checkpoints whose greedy continuations are worth comparing.

The weights are scaled so that next-token logits have a standard deviation of LOGIT_STD; dummy
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
from typing import Any, Literal

import torch
import transformers

import default_model.tokenizer
from default_model.tokenizer import VOCAB_SIZE, tokenizer_files, train_tokenizer

Arch = Literal["llama", "qwen2", "qwen3"]

LOGIT_STD = 4.0

_CLASSES: dict[str, tuple[type, type]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "pad_token_id": 0,
}


@cache
def _tokenizer_files(max_length: int) -> dict[str, bytes]:
    return tokenizer_files(train_tokenizer(), max_length)


def _scale(name: str, weight: torch.Tensor, tied: bool) -> tuple[float, float]:
    """Return (mean, standard deviation) of the parameter called `name`."""
    if name.endswith("norm.weight"):
        # Query and key norms set the spread of the attention scores; 1.5 makes attention choose.
        return (1.5, 0.2) if name.endswith(("q_norm.weight", "k_norm.weight")) else (1.0, 0.2)
    if name.endswith("bias"):
        return 0.0, 0.5
    if name == "model.embed_tokens.weight":
        return 0.0, LOGIT_STD * weight.shape[1] ** -0.5 if tied else 1.0
    unit = float(weight.shape[1] ** -0.5)
    if name == "lm_head.weight":
        return 0.0, LOGIT_STD * unit
    return 0.0, unit * (2**0.5 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0)


def _randomise(model: torch.nn.Module, seed: int, tied: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            mean, std = _scale(name, parameter, tied)
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(values * std + mean)


def make_checkpoint(
    arch: Arch, path: Path, *, dtype: str = "float32", seed: int = 0, **config_overrides: Any
) -> Path:
    """Write a checkpoint with the default model's tokenizer and chat template into `path`.

    `dtype` is a torch dtype name ("float32", "bfloat16", "float16"); `config_overrides` replace
    fields of the Hugging Face configuration. Returns `path`.
    """
    config_class, model_class = _CLASSES[arch]
    config = config_class(**{**_SIZES, **config_overrides})
    model = model_class(config)
    _randomise(model, seed, config.tie_word_embeddings)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    for name, content in _tokenizer_files(config.max_position_embeddings).items():
        (path / name).write_bytes(content)
    return path


@cache
def _builder_digest() -> str:
    digest = hashlib.sha256()
    package = Path(default_model.tokenizer.__file__).parent
    for source in (Path(__file__), *sorted(package.glob("[!_]*.*"))):
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
        self, arch: Arch, *, dtype: str = "float32", seed: int = 0, **config_overrides: Any
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
