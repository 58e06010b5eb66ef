"""A mixture of experts to measure with: Qwen3-MoE in shape, small enough for three."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.models.shapes import BYTES_PER_WEIGHT, Checkpoint, Family, Shape, built_checkpoint

EXPERTS, TOP_K = 32, 4
HIDDEN, INTERMEDIATE = 512, 768
_LAYERS = 6
_SHAPE = Shape(
    family=Family(config_class="Qwen3MoeConfig", model_class="Qwen3MoeForCausalLM"),
    fields={
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
    },
)


def moe_checkpoint() -> Checkpoint:
    """Return the checkpoint; its `step_weight_bytes` are those that one row reads."""
    checkpoint = built_checkpoint("moe", _SHAPE)
    unread = _LAYERS * (EXPERTS - TOP_K) * 3 * HIDDEN * INTERMEDIATE * BYTES_PER_WEIGHT
    return replace(checkpoint, step_weight_bytes=checkpoint.step_weight_bytes - unread)
