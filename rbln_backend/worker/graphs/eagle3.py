"""EAGLE-3's part in the served model's graphs: hidden states of several layers, combined.

vLLM's classes return those of the layers that a draft model names; a linear layer of the draft
model makes one row of them. So a step has one more output of the draft model's width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.vllm_compat.surface import ModelConfig, get_pp_group
from rbln_backend.worker.graphs.layer_states import LayerStates

PART = "draft_model"
"""The name of the draft model in the served one."""

_LAYERS = "eagle_aux_hidden_state_layer_ids"


def return_layers(made: Any, served: Any, own: ModelConfig) -> None:
    """Make ``served`` return the hidden states of the layers that ``made`` reads.

    ``made`` is None in a pipeline stage without the draft model, which hands them over. Raises
    ``UnsupportedModelError`` for layers that the served model does not have.
    """
    found = own.hf_config
    options = getattr(found, "eagle_config", None) or {}
    if not options.get("use_aux_hidden_state", True):
        return
    named = getattr(found, _LAYERS, None) or options.get(_LAYERS)
    layers = tuple(named or served.get_eagle3_default_aux_hidden_state_layers())
    last, count = len(served.model.layers), len(layers)
    if made is not None:
        count = made.model.fc_input_size // served.config.hidden_size
    if len({*layers} & {*range(last + 1)}) != count or len(layers) != count:
        raise UnsupportedModelError(
            f"draft model {own.model}: {_LAYERS} must be {count} layers from 0 to {last}, got "
            f"{list(layers)}"
        )
    served.set_aux_hidden_state_layers(layers)
    inner = served.model
    if get_pp_group().world_size > 1 and not inner.supports_aux_hidden_states_over_pp:
        served.layer_states = LayerStates(inner)


def reads_layers(own: Any) -> bool:
    """Return True for a draft model that reads hidden states of several layers."""
    return bool(getattr(own.model, "use_aux_hidden_state", False))


def check_tables(made: Any, served: Any, own: ModelConfig) -> None:
    """Fill the LM head of ``made`` from the served model's where its checkpoint has none.

    Raises ``UnsupportedModelError`` if that has another size, or the embedding that is shared.
    """
    head, table = made.lm_head.weight, made.model.embed_tokens.weight
    if head.is_meta:
        return
    found = getattr(served_embedding(served), "weight", None)
    # In another pipeline stage it has as many rows.
    shape = [len(table), served.config.hidden_size] if found is None else list(found.shape)
    if list(table.shape) != shape and not made.has_own_embed_tokens:
        raise UnsupportedModelError(
            f"draft model {own.model}: embed_tokens.weight must be in the checkpoint, because the "
            f"served model's has another size, {shape}"
        )
    if made.has_own_lm_head:
        return
    found = getattr(served.lm_head, "weight", None)
    if found is None or found.shape != head.shape or found.dtype != head.dtype:
        raise UnsupportedModelError(
            f"draft model {own.model}: lm_head.weight must be in the checkpoint, because the "
            "served model's has another size or is quantised"
        )
    head.data.copy_(found)


def served_embedding(served: Any) -> Any:
    """Return the embedding of a served model, which has two names in vLLM's classes.

    It has no weight in a pipeline stage that does not need it.
    """
    inner = served.model
    return inner.embed_tokens if hasattr(inner, "embed_tokens") else inner.embedding


def draft_logits(own: Any, hidden: Tensor) -> Tensor:
    """Hidden states [R, H] to logits [R, V] of a layer, V of its own vocabulary if it has one."""
    if getattr(own, "draft_id_to_target_id", None) is None:
        return cast("Tensor", own.compute_logits(hidden))
    return cast("Tensor", own.logits_processor(own.lm_head, hidden))


def read_hidden(model: nn.Module, result: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a model's hidden states [rows, H], and those of its layers for EAGLE-3.

    ``result`` is what vLLM's class returns: hidden states, with those of the layers if a draft
    model reads them, [rows, H] each. They become one [rows, the draft model's H].
    """
    if not isinstance(result, tuple):
        return cast("Tensor", result), ()
    hidden, layers = result
    own: Any = getattr(model, PART)
    return hidden, (own.combine_hidden_states(torch.cat(layers, dim=-1)),)
