"""The draft model of an engine: Medusa's heads, loaded as a part of the served model.

As a part of it the heads are named, packed, counted and moved to huge pages as its weights are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.speculation.choice import has_draft_model
from rbln_backend.vllm_compat.surface import ModelConfig, VllmConfig

PART = "draft_model"
"""The name of the draft model in the served one."""


def add_draft_model(
    model: nn.Module, config: VllmConfig, make: Callable[[ModelConfig], nn.Module]
) -> None:
    """Add the draft model that ``make`` returns to ``model``, if ``config`` names one.

    Raises ``UnsupportedModelError`` for one of another size, and ``ValueError`` of vLLM for a
    checkpoint that lacks weights.
    """
    speculation = config.speculative_config
    if speculation is None or not has_draft_model(speculation):
        return
    own = speculation.draft_model_config
    _check_sizes(own, config.model_config)
    try:
        made = make(own)
    except ValueError as error:
        # vLLM's message names the weights that a checkpoint lacks, but not the checkpoint.
        number = speculation.num_speculative_tokens
        raise UnsupportedModelError(
            f"draft model {own.model} with num_speculative_tokens {number}: {error}"
        ) from error
    model.add_module(PART, made)


def _check_sizes(own: ModelConfig, served: ModelConfig) -> None:
    found = own.hf_config
    expected = {
        "hidden_size": (own.get_hidden_size(), served.get_hidden_size(), "the served model's"),
        "vocab_size": (found.vocab_size, served.get_vocab_size(), "the served model's"),
        # vLLM reads no checkpoint with a token_map: it takes it for a weight that is missing.
        "truncated_vocab_size": (found.truncated_vocab_size, found.vocab_size, "vocab_size"),
    }
    for name, (value, wanted, whose) in expected.items():
        if value != wanted:
            raise UnsupportedModelError(
                f"draft model {own.model}: {name} must be {whose}, {wanted}, got {value}"
            )


def draft_model(model: nn.Module) -> Any:
    """Return the draft model of ``model``, None without one."""
    return getattr(model, PART, None)


def draft_function(model: nn.Module, *, by_sdk: bool) -> Callable[[Tensor], tuple[Tensor]]:
    """Return the function of the draft model's graph, hidden [B, H] to drafts int32 [B, heads].

    ``by_sdk``: it ends in the SDK's argmax.
    """
    heads = draft_model(model)
    pick = _picked_by_sdk if by_sdk else _picked_here

    def drafts(hidden: Tensor) -> tuple[Tensor]:
        """[B, H] -> drafts int32 [B, heads]: numbers of the draft vocabulary."""
        rows = zip(heads(hidden), heads.lm_heads, strict=True)
        tokens = [pick(heads.logits_processor(head, own)) for own, head in rows]
        return (torch.stack(tokens, dim=1),)

    return drafts


def _picked_by_sdk(logits: Tensor) -> Tensor:
    """Logits [B, V] to tokens int32 [B]."""
    tokens: Tensor = torch.ops.rbln.argmax(logits)
    return tokens


def _picked_here(logits: Tensor) -> Tensor:
    """Logits [B, V] to tokens int32 [B]."""
    tokens: Tensor = torch.ops.rbln_emulator.greedy(logits)
    return tokens.view(-1)
