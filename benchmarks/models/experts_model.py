"""A mixture of experts to measure with: Qwen3-MoE in shape, small enough for three engines at once.

Built once from a fixed seed and kept beside the checkpoints of ``models.shapes``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from benchmarks.models.shapes import (
    BYTES_PER_WEIGHT,
    CACHE_ROOT,
    LOGIT_STD,
    SEED,
    Checkpoint,
    built_once,
)

EXPERTS, TOP_K = 32, 4
HIDDEN, INTERMEDIATE = 512, 768
_LAYERS = 6
_FIELDS: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * INTERMEDIATE,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def moe_checkpoint() -> Checkpoint:
    """Return the checkpoint; its `step_weight_bytes` are those that one row reads."""
    path, parameters = _build_once(), _parameters()
    unread = _LAYERS * (EXPERTS - TOP_K) * 3 * HIDDEN * INTERMEDIATE
    embedding = _FIELDS["vocab_size"] * HIDDEN
    return Checkpoint(
        name="moe",
        path=path,
        parameters=parameters,
        step_weight_bytes=(parameters - unread - embedding) * BYTES_PER_WEIGHT,
        vocab_size=_FIELDS["vocab_size"],
        max_position_embeddings=_FIELDS["max_position_embeddings"],
    )


def _model() -> Any:
    import torch
    import transformers

    with torch.device("meta"):
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_FIELDS))


def _parameters() -> int:
    return sum(parameter.numel() for parameter in _model().parameters())


def _build_once() -> Path:
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    place = CACHE_ROOT / f"moe-{digest}"
    return built_once(place, _build)


def _build(path: Path) -> None:
    import torch

    model = _model()
    model.bfloat16()
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            mean, std = _scale(name, parameter.shape[-1])
            parameter.normal_(mean, std, generator=generator)
    model.save_pretrained(path)


def _scale(name: str, fan_in: int) -> tuple[float, float]:
    """Return (mean, standard deviation) of the parameter called `name`."""
    if name.endswith("norm.weight"):
        return 1.0, 0.2
    if name.endswith("embed_tokens.weight"):
        return 0.0, 1.0
    unit = float(fan_in**-0.5)
    return 0.0, LOGIT_STD * unit if name.endswith("lm_head.weight") else unit
