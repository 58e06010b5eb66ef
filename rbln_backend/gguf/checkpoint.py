"""Writes a GGUF file as a checkpoint folder: configuration, tokenizer, safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from rbln_backend.errors import CheckpointError
from rbln_backend.gguf.families import Family, family_of
from rbln_backend.gguf.keys import ModelKeys
from rbln_backend.gguf.reader import GgufFile
from rbln_backend.gguf.tokenizer import make_tokenizer, special_tokens
from rbln_backend.gguf.vocabulary import check_vocabulary
from rbln_backend.gguf.weights import EMBEDDING, HEAD, Weights
from rbln_backend.quantization.schemes import GGUF

_SHARD_BYTES = 2 << 30
_INDEX = "model.safetensors.index.json"

Report = Callable[[int, int], None]
"""Tensors that are written, of how many."""


def write_checkpoint(path: Path, folder: Path, report: Report = lambda _done, _total: None) -> str:
    """Write `path` into the empty `folder`; return in words what became of its weights.

    Holds one shard of 2 GiB and one tensor in memory. Raises `CheckpointError` for a file that is
    damaged or has anything that is not read, before a weight is written.
    """
    file = GgufFile.open(path)
    family = family_of(file)
    keys = ModelKeys(file.metadata, file.architecture)
    fields = family.config(file, keys)
    keys.refuse_unread()
    check_vocabulary(file.metadata, fields["vocab_size"])
    tokens = special_tokens(file)
    config = _config(family, {**fields, **tokens, "dtype": file.dtype})
    weights = Weights.of(file, family, config)
    config.architectures = [weights.architecture]
    if weights.forms:
        config.quantization_config = _quantization(weights, config)
    tokenizer = make_tokenizer(file, config.max_position_embeddings)
    config.save_pretrained(folder)
    GenerationConfig(**tokens).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _write_weights(weights, folder, report)
    return _summary(weights)


def _config(family: Family, fields: Mapping[str, Any]) -> PreTrainedConfig:
    try:
        return CONFIG_MAPPING[family.model_type](**fields)
    except Exception as error:
        # transformers checks values in ways of its own; the file is what is wrong with them.
        raise CheckpointError(f"its keys make no {family.model_type} model: {error}") from error


def _quantization(weights: Weights, config: PreTrainedConfig) -> dict[str, Any]:
    layers = {name: asdict(form) for name, form in sorted(weights.forms.items())}
    if config.tie_word_embeddings and EMBEDDING in layers:
        layers[HEAD] = layers[EMBEDDING]
    return {"quant_method": GGUF, "layers": layers}


def _summary(weights: Weights) -> str:
    """Describe the written weights by their block types."""
    file = weights.file
    dtype = str(file.dtype).removeprefix("torch.")
    kept: set[str | None] = set()
    expanded: set[str | None] = set()
    for name, source in weights.names.items():
        is_kept = name.removesuffix(".weight") in weights.forms
        (kept if is_kept else expanded).add(file.type_name(source))
    parts = []
    if kept:
        parts.append(f"weights of {', '.join(sorted(filter(None, kept)))} kept packed")
    if others := sorted(filter(None, expanded)):
        parts.append(f"weights of {', '.join(others)} expanded to {dtype}")
    return "; ".join(parts) or f"weights in {dtype}, as in the file"


def _write_weights(weights: Weights, folder: Path, report: Report) -> None:
    shards = _shards(weights)
    total, done = len(weights.names), 0
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            report(done, total)
            parts = weights.read(name)
            tensors |= parts
            places |= dict.fromkeys(parts, shard)
            done += 1
        save_file(tensors, folder / shard, {"format": "pt"})
    size = sum(map(weights.num_bytes, weights.names))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    report(total, total)


def _shards(weights: Weights) -> list[list[str]]:
    """Group the model's names into files of a bounded size."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(weights.names):
        size += weights.num_bytes(name)
        if shards[-1] and size > _SHARD_BYTES:
            shards.append([])
            size = weights.num_bytes(name)
        shards[-1].append(name)
    return shards
