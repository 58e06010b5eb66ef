"""Checkpoints to measure with: built once from a fixed seed and kept in the user's cache.

Invariant: a folder in the cache is complete, and its name contains the hash of what built it. The
weights are random but scaled, so that activations and next-token logits have ordinary sizes.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CACHE_ROOT = Path.home() / ".cache" / "rbln-serve" / "bench"
SEED = 0
LOGIT_STD = 4.0
BYTES_PER_WEIGHT = 2  # bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Classes of transformers."""

    config_class: str
    model_class: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A family and the fields of its configuration."""

    family: Family
    fields: dict[str, Any]


_LLAMA = Family(config_class="LlamaConfig", model_class="LlamaForCausalLM")
_GPT_OSS = Family(config_class="GptOssConfig", model_class="GptOssForCausalLM")
_15M: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 288,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
_160M: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "tie_word_embeddings": False,
}


def _with_heads(heads: int, kv_heads: int, size: int) -> Shape:
    particular = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
    }
    return Shape(family=_LLAMA, fields={**_160M, **particular})


# The sizes of well-known models: stories-15M with heads of 32, so that every engine has kernels
# for them, llama-160m, and Llama 3.2 1B.
SHAPES: dict[str, Shape] = {
    "15m": Shape(family=_LLAMA, fields=_15M),
    "160m": Shape(family=_LLAMA, fields=_160M),
    # Widths that no tile divides, and the head sizes of other families.
    "160m-heads-80": Shape(
        family=_LLAMA,
        fields={
            **_160M,
            "vocab_size": 32003,
            "hidden_size": 800,
            "intermediate_size": 2190,
            "num_attention_heads": 10,
            "num_key_value_heads": 10,
            "head_dim": 80,
        },
    ),
    "160m-heads-128": _with_heads(6, 2, 128),
    "160m-heads-256": _with_heads(3, 1, 256),
    "1.2b": Shape(
        family=_LLAMA,
        fields={
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    # gpt-oss-20b with fewer, narrower layers: its experts are nine tenths of it.
    "gpt-oss-0.9b": Shape(
        family=_GPT_OSS,
        fields={
            "vocab_size": 32000,
            "hidden_size": 1024,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "tie_word_embeddings": False,
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk and the bytes that a decode step reads.

    `step_weight_bytes` counts every weight in bfloat16 except the input embedding, of which a step
    reads only a few rows; a tied embedding is read whole, as the LM head.
    """

    name: str
    path: Path
    parameters: int
    step_weight_bytes: int
    vocab_size: int
    max_position_embeddings: int


def find_checkpoint(name: str) -> Checkpoint:
    """Return the checkpoint of a name in SHAPES, built if need be, or of the folder `name`.

    Raises ValueError if `name` is neither.
    """
    if name in SHAPES:
        return built_checkpoint(name, SHAPES[name])
    path = Path(name)
    if not (path / "config.json").is_file():
        raise ValueError(
            f"--model {name}: neither a folder with a config.json nor one of {', '.join(SHAPES)}"
        )
    return _describe(path.resolve().name, path.resolve())


def _describe(name: str, path: Path) -> Checkpoint:
    from safetensors import safe_open

    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    sizes: dict[str, int] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for tensor in tensors.keys():  # noqa: SIM118 - not a dict: it has no iterator
                sizes[tensor] = math.prod(tensors.get_slice(tensor).get_shape())
    if not sizes:
        raise ValueError(f"--model {path}: the folder has no *.safetensors files")
    embedding = sizes["model.embed_tokens.weight"] if "lm_head.weight" in sizes else 0
    return Checkpoint(
        name=name,
        path=path,
        parameters=sum(sizes.values()),
        step_weight_bytes=(sum(sizes.values()) - embedding) * BYTES_PER_WEIGHT,
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
    )


def built_checkpoint(name: str, shape: Shape) -> Checkpoint:
    """Return the checkpoint of `shape`, built on first use."""
    digest = hashlib.sha256(Path(__file__).read_bytes() + repr(shape).encode()).hexdigest()[:12]
    place = built_once(CACHE_ROOT / f"{name}-{digest}", lambda folder: _build(folder, shape))
    return _describe(name, place)


def built_once(place: Path, build: Callable[[Path], None]) -> Path:
    """Return the folder `place`, filled by `build` under another name if it does not exist."""
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix="building-", dir=place.parent))
    try:
        build(building)
        building.rename(place)
    except OSError:
        # Another process was first; its copy is the same.
        if not place.exists():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return place


def _build(path: Path, shape: Shape) -> None:
    import torch
    import transformers

    config = getattr(transformers, shape.family.config_class)(
        **shape.fields, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    # Made without storage first: the library's own initialisation of 1.2B weights takes minutes.
    with torch.device("meta"):
        model = getattr(transformers, shape.family.model_class)(config)
    model.bfloat16()
    model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            mean, std = _scale(name, parameter.shape[-1], config.tie_word_embeddings)
            parameter.normal_(mean, std, generator=generator)
    model.save_pretrained(path)


def _scale(name: str, fan_in: int, tied: bool) -> tuple[float, float]:
    """Return (mean, standard deviation) of the parameter called `name`."""
    unit = fan_in**-0.5
    if name.endswith("norm.weight"):
        return 1.0, 0.2
    if name == "model.embed_tokens.weight":
        return 0.0, LOGIT_STD * unit if tied else 1.0
    if name == "lm_head.weight":
        return 0.0, LOGIT_STD * unit
    # Attention scores with some spread, so that attention chooses.
    return 0.0, unit * (2**0.5 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0)
