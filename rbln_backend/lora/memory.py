"""Memory that the slots of all adapters take, computed from the model's shapes."""

from __future__ import annotations

from typing import Any

from torch import nn

from rbln_backend.lora.expert_layer import ExpertSizes, adaptable_experts
from rbln_backend.lora.lm_head import lm_heads
from rbln_backend.vllm_compat.lora import LoRAConfig, adaptable_modules, is_in_target_modules


def slot_bytes(
    model: nn.Module, lora: LoRAConfig, item_bytes: int, *, linear_only: bool = False
) -> int:
    """Bytes of ``max_loras`` slots over all layers that adapters may change.

    ``model`` need have no weights; edges that are filled up are left out. ``linear_only``: without
    experts and heads, as on an NPU.
    """
    rank, packed = lora.max_lora_rank, getattr(model, "packed_modules_mapping", None)
    sizes = {name: _of_linear(model.get_submodule(name), rank) for name in adaptable_modules(model)}
    for name, runner in () if linear_only else adaptable_experts(model):
        sizes[name] = ExpertSizes.of(runner).elements(rank)
    for name, _, head in () if linear_only else lm_heads(model):
        sizes[name] = rank * (head.embedding_dim + head.num_embeddings_per_partition)
    wanted = (
        size
        for name, size in sizes.items()
        if is_in_target_modules(name, lora.target_modules, packed)
    )
    return sum(wanted) * lora.max_loras * item_bytes


def _of_linear(layer: Any, rank: int) -> int:
    outputs = getattr(layer, "output_sizes", None) or [layer.output_size]
    elements: int = len(outputs) * layer.input_size + sum(outputs)
    return elements * rank
