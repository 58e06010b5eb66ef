"""Sampling on the device: ``rbln::argmax`` and ``rbln::top_k_top_p``."""

from __future__ import annotations

import torch
from rebel.ops.library import RBLN, define
from rebel.settings import SETTINGS
from torch import Tensor


def argmax(logits: Tensor) -> Tensor:
    """logits [B, V] to int32 [B]; with ``argmax`` broken the smallest instead."""
    chosen = logits.argmin(-1) if "argmax" in SETTINGS.broken else logits.argmax(-1)
    return chosen.to(torch.int32)


def top_k_top_p(probs: Tensor, k: Tensor | None = None, p: Tensor | None = None) -> Tensor:
    """A draw from probs [B, V], cut to the k likeliest and to the likeliest that make up p."""
    ordered, ids = probs.float().sort(dim=-1, descending=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if k is not None:
        kept &= torch.arange(ordered.shape[1]) < k.long()[:, None]
    if p is not None:
        kept &= ordered.cumsum(-1) - ordered < p[:, None]
    chosen = torch.multinomial(ordered * kept, 1)
    return ids.gather(1, chosen).squeeze(1).to(torch.int32)


def _fake(logits: Tensor, *rest: object) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


define(RBLN, "argmax", "Tensor logits", argmax, _fake)
define(RBLN, "top_k_top_p", "Tensor probs, Tensor? k, Tensor? p", top_k_top_p, _fake)
