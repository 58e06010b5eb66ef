"""The draft model of an engine: Medusa's heads or a layer, a part of the served model.

As a part of it its weights are named, packed, counted and moved to huge pages as the others are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rbln_backend.bucketing.engine_buckets import DRAFT_LAYERS, EAGLE3
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.parallel import stage_loan
from rbln_backend.speculation.choice import draft_model_of
from rbln_backend.vllm_compat.surface import ModelConfig, VllmConfig, get_pp_group
from rbln_backend.worker.graphs.eagle3 import (
    PART,
    check_tables,
    draft_logits,
    return_layers,
    served_embedding,
)
from rbln_backend.worker.graphs.rows import in_rows

GraphFunction = Callable[..., Any]


def add_draft_model(
    model: nn.Module,
    config: VllmConfig,
    make: Callable[[VllmConfig, ModelConfig], nn.Module],
    has_embedding: bool,
) -> None:
    """Add the draft model to ``model``, if ``config`` names one; of pipeline stages to the last.

    The other stages carry what it reads. ``make`` returns it from its engine's and its own
    configuration. ``has_embedding``: a layer has another embedding than ``model``, see
    ``has_own_embedding``.

    Raises ``UnsupportedModelError`` for one of another size, and for a checkpoint that lacks
    weights or has others.
    """
    speculation = draft_model_of(config)
    if speculation is None:
        return
    own = speculation.draft_model_config
    _check_sizes(own, config.model_config, reads_layers=speculation.method == EAGLE3)
    if not get_pp_group().is_last_rank:
        _add_carried(model, config, own, str(speculation.method))
        return
    try:
        made = make(_of_one_stage(config), own)
    except ValueError as error:
        # vLLM's message names the weights that a checkpoint lacks, but not the checkpoint.
        number = speculation.num_speculative_tokens
        raise UnsupportedModelError(
            f"draft model {own.model} with num_speculative_tokens {number}: {error}"
        ) from error
    except KeyError as error:
        # vLLM's readers of MTP layers look up a parameter for each tensor.
        raise UnsupportedModelError(
            f"draft model {own.model}: no part of {own.architecture} has the tensor {error}"
        ) from error
    is_loaded = config.load_config.load_format != "dummy"
    if speculation.method == EAGLE3:
        return_layers(made, model, own)
        if is_loaded:
            check_tables(made, model, own)
    if speculation.method in DRAFT_LAYERS:
        _share_tables(made, model, own.model, is_loaded=is_loaded, has_own=has_embedding)
    model.add_module(PART, made)


def _add_carried(model: nn.Module, config: VllmConfig, own: ModelConfig, method: str) -> None:
    """Make a stage without the draft model ``own`` carry what that reads of ``model``."""
    if method == EAGLE3:
        return_layers(None, model, own)
    if method not in DRAFT_LAYERS or not get_pp_group().is_first_rank:
        return
    table = served_embedding(model).weight
    if not (table.is_meta or config.load_config.load_format == "dummy"):
        stage_loan.lend(table.data)


def _of_one_stage(config: VllmConfig) -> VllmConfig:
    """Return ``config`` for a layer that is whole in its stage, which vLLM adds to the same engine.

    vLLM numbers an EAGLE layer by the served model's layers, of all stages.
    """
    if config.parallel_config.pipeline_parallel_size == 1:
        return config
    alone = copy.copy(config)
    alone.parallel_config = copy.copy(config.parallel_config)
    alone.parallel_config.pipeline_parallel_size = 1
    return alone


def _share_tables(made: Any, served: Any, name: str, *, is_loaded: bool, has_own: bool) -> None:
    """Give a layer the served model's LM head, and its embedding unless ``has_own``.

    EAGLE-3's LM head is its own: it may have another vocabulary. The embedding of the first
    pipeline stage is copied, if it ``is_loaded``.

    Raises ``UnsupportedModelError`` for another embedding of the checkpoint ``name`` that
    ``has_own`` does not state.
    """
    if not hasattr(made, "draft_id_to_target_id"):
        made.lm_head = served.lm_head
    for part in made.modules():
        # MTP layers of some families have an LM head each, which vLLM replaces as well.
        if hasattr(part, "shared_head"):
            part.shared_head.head = served.lm_head
    own, tables = made.model.embed_tokens, served_embedding(served)
    is_read = getattr(made, "has_own_embed_tokens", False)
    is_elsewhere = not hasattr(tables, "weight")
    if get_pp_group().world_size > 1 and is_loaded and not own.weight.is_meta:
        stage_loan.borrow(own.weight.data if is_elsewhere and not is_read else None)
    if is_elsewhere or has_own or own.weight.shape != tables.weight.shape:
        return
    if is_read and not torch.equal(own.weight, tables.weight):
        raise UnsupportedModelError(
            f"draft model {name}: embed_tokens.weight must be in a file *.safetensors, *.bin or "
            "*.pt"
        )
    made.model.embed_tokens = tables


def _check_sizes(own: ModelConfig, served: ModelConfig, *, reads_layers: bool) -> None:
    found = own.hf_config
    width = (reads_layers and getattr(found, "target_hidden_size", None)) or own.get_hidden_size()
    expected = {
        "hidden_size": (width, served.get_hidden_size(), "the served model's"),
        "vocab_size": (found.vocab_size, served.get_vocab_size(), "the served model's"),
    }
    if hasattr(found, "truncated_vocab_size"):
        # vLLM reads no checkpoint with a token_map: it takes it for a weight that is missing.
        sizes = found.truncated_vocab_size, found.vocab_size
        expected["truncated_vocab_size"] = (*sizes, "vocab_size")
    for name, (value, wanted, whose) in expected.items():
        if value != wanted:
            raise UnsupportedModelError(
                f"draft model {own.model}: {name} must be {whose}, {wanted}, got {value}"
            )


def draft_model(model: nn.Module) -> Any:
    """Return the draft model of ``model``, None without one."""
    return getattr(model, PART, None)


def draft_function(
    model: nn.Module, *, by_sdk: bool, keeps_axes: bool
) -> tuple[GraphFunction, tuple[str, ...]]:
    """Return the function of a draft model's graphs and the names of its inputs.

    Hidden [B, H] to drafts int32 [B, heads]; or last_rows [R], input_ids and positions [B, L] and
    hidden [B * L, H] to drafts int32 [R] and hidden states [R, H]. ``by_sdk``: the graphs end in
    the SDK's argmax. ``keeps_axes``: layers take [B, L, H], else rows.
    """
    own = draft_model(model)
    pick = _picked_by_sdk if by_sdk else _picked_here
    if hasattr(own, "lm_heads"):
        return _heads(own, pick), ("hidden",)
    return _layer(own, pick, keeps_axes), ("last_rows", "input_ids", "positions", "hidden")


def _heads(own: Any, pick: Callable[[Tensor], Tensor]) -> GraphFunction:
    def drafts(hidden: Tensor) -> tuple[Tensor]:
        """[B, H] -> drafts int32 [B, heads]."""
        rows = zip(own(hidden), own.lm_heads, strict=True)
        tokens = [pick(own.logits_processor(head, states)) for states, head in rows]
        return (torch.stack(tokens, dim=1),)

    return drafts


def _layer(own: Any, pick: Callable[[Tensor], Tensor], keeps_axes: bool) -> GraphFunction:
    def draft(
        last_rows: Tensor, input_ids: Tensor, positions: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[R], [B, L], [B, L], [B * L, H] -> drafts int32 [R], hidden states [R, H]."""
        states = _computed(own, keeps_axes, input_ids, positions, hidden)
        # Those for the LM head, and those that the next token is drafted with.
        for_head, following = states if isinstance(states, tuple) else (states, states)
        last = for_head.index_select(0, last_rows)
        tokens = pick(draft_logits(own, last))
        return tokens, last if following is for_head else following.index_select(0, last_rows)

    return draft


def _computed(
    own: Any, keeps_axes: bool, input_ids: Tensor, positions: Tensor, hidden: Tensor
) -> Any:
    """input_ids and positions [B, L], hidden [B * L, H] to what a draft model returns, in rows."""
    if not keeps_axes:
        return own(input_ids.view(-1), positions.view(-1), hidden)
    return in_rows(own(input_ids, positions, hidden.view(*input_ids.shape, -1)))


def _picked_by_sdk(logits: Tensor) -> Tensor:
    """Logits [B, V] to tokens int32 [B]."""
    tokens: Tensor = torch.ops.rbln.argmax(logits)
    return tokens


def _picked_here(logits: Tensor) -> Tensor:
    """Logits [B, V] to tokens int32 [B]."""
    tokens: Tensor = torch.ops.rbln_emulator.greedy(logits)
    return tokens.view(-1)
