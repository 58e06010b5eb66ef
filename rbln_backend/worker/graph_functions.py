"""The functions that are captured, one per phase: embedding to LM head, or to hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rbln_backend.compiler.port import Phase

GraphFunction = Callable[..., Any]


def graph_function(phase: Phase, model: nn.Module) -> tuple[GraphFunction, tuple[str, ...]]:
    """The function of ``phase`` over ``model`` and the input names it takes, in order."""
    if phase is Phase.LOGITS:
        return _logits(model), ("hidden",)
    if phase is Phase.POOLING:
        return _pooling(model), ("input_ids", "positions")
    if phase is Phase.PREFILL:
        return _prefill(model), ("input_ids", "positions", "token_indices")
    return _decode(model), ("input_ids", "positions")


def _prefill(model: Any) -> GraphFunction:
    def prefill(
        input_ids: Tensor, positions: Tensor, token_indices: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[1, L], [1, L], [1] -> logits [1, V] of one row, hidden states [L, H]."""
        hidden = _hidden(model, input_ids, positions)
        return model.compute_logits(hidden.index_select(0, token_indices)), hidden

    return prefill


def _pooling(model: Any) -> GraphFunction:
    def pooling(input_ids: Tensor, positions: Tensor) -> tuple[Tensor]:
        """[1, L], [1, L] -> hidden states [L, H]; the pooler runs on the host."""
        return (_hidden(model, input_ids, positions),)

    return pooling


def _decode(model: Any) -> GraphFunction:
    def decode(input_ids: Tensor, positions: Tensor) -> tuple[Tensor]:
        """[B, 1], [B, 1] -> logits [B, V]."""
        return (model.compute_logits(_hidden(model, input_ids, positions)),)

    return decode


def _logits(model: Any) -> GraphFunction:
    def logits(hidden: Tensor) -> tuple[Tensor]:
        """[rows, H] -> logits [rows, V]."""
        return (model.compute_logits(hidden),)

    return logits


def _hidden(model: Any, input_ids: Tensor, positions: Tensor) -> Tensor:
    # vLLM's models take a flat run of tokens; the batch shape lives in the attention metadata.
    hidden: Tensor = model(
        input_ids=input_ids.view(-1),
        positions=positions.view(-1),
        intermediate_tensors=None,
        inputs_embeds=None,
    )
    return hidden
