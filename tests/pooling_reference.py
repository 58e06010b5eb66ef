"""Hidden states and class scores by transformers in float32: what pooling must come to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel


@lru_cache(maxsize=2)
def _load(path: Path, kind: type) -> PreTrainedModel:
    model: PreTrainedModel = kind.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def hidden_states(path: Path, token_ids: Sequence[int], *, sees_all: bool = False) -> Tensor:
    """[T, H]: the last layer's output after the final norm.

    ``sees_all`` makes a decoder attend in both directions.
    """
    ids = torch.tensor([list(token_ids)])
    mask = torch.zeros(1, 1, len(token_ids), len(token_ids)) if sees_all else None
    with torch.inference_mode():
        result: Tensor = _load(path, AutoModel)(ids, attention_mask=mask).last_hidden_state
    return result[0]


def class_logits(
    path: Path, token_ids: Sequence[int], *, document_start: int | None = None
) -> Tensor:
    """[labels], before any activation; tokens from ``document_start`` on are of type 1."""
    ids = torch.tensor([list(token_ids)])
    types: dict[str, Tensor] = {}
    if document_start is not None:
        types["token_type_ids"] = (torch.arange(len(token_ids)) >= document_start).long()[None]
    with torch.inference_mode():
        result: Tensor = _load(path, AutoModelForSequenceClassification)(ids, **types).logits
    return result[0]


def pooled(path: Path, token_ids: Sequence[int], pooling: str) -> Tensor:
    """[H]: one of LAST, CLS and MEAN over the hidden states, scaled to length 1."""
    rows = hidden_states(path, token_ids)
    vector = {"LAST": rows[-1], "CLS": rows[0], "MEAN": rows.mean(0)}[pooling]
    return torch.nn.functional.normalize(vector, dim=-1)
