"""Sampling on the device: ``argmax``, ``top_k_top_p`` and ``rejection_sample``, all ``rbln::``."""

from __future__ import annotations

from typing import Any

import torch
from rebel.ops.library import RBLN, define
from rebel.random import GENERATOR
from rebel.settings import SETTINGS
from torch import Tensor

_LARGEST_P = torch.tensor(0.995)


def argmax(logits: Tensor) -> Tensor:
    """logits [B, V] to int32 [B]; with ``argmax`` broken the smallest instead."""
    chosen = logits.argmin(-1) if "argmax" in SETTINGS.broken else logits.argmax(-1)
    return chosen.to(torch.int32)


def top_k_top_p(probs: Tensor, k: Tensor | None = None, p: Tensor | None = None) -> Tensor:
    """A draw from probs [B, V], cut to the k likeliest and to the likeliest that make up p."""
    if p is not None and bool((p > _LARGEST_P).any()):
        raise RuntimeError(
            f"p is {float(p.max())}: the vendor's release never gives more than 0.995"
        )
    return torch.multinomial(_cut(probs, k, p), 1, generator=GENERATOR).squeeze(1).to(torch.int32)


def _cut(probs: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """probs [B, V] with zeros instead of what is not among the k likeliest, or those of p.

    As vLLM's filters, which the vendor replaces by this: p of what k leaves.
    """
    ordered, ids = probs.float().sort(dim=-1, descending=True)
    if k is not None:
        ordered = ordered * (torch.arange(ordered.shape[1]) < k.long()[:, None])
    if p is not None:
        shares = ordered / ordered.sum(-1, keepdim=True)
        ordered = ordered * (shares.cumsum(-1) - shares < p[:, None])
    return torch.zeros_like(ordered).scatter(1, ids, ordered)


def rejection_sample(
    drafts: Tensor, probs: Tensor, ends: Tensor, k: Tensor | None = None, p: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Accept drafts, packed int32 [B * K], of which request r has those before ``ends`` [B].

    A draft is certain to its drafter: it is accepted with its probability in probs [B * K, V].
    Returns the token drawn in place of the first rejected one, int32 [B, K] and 0 elsewhere, and
    the number accepted, int32 [B].
    """
    batch = len(ends)
    recovered = drafts.new_zeros((batch, len(drafts) // batch))
    accepted = drafts.new_zeros(batch)
    first = 0
    for row, end in enumerate(ends.tolist()):
        own = slice(row, row + 1)
        for number, place in enumerate(range(first, end)):
            (left,) = _cut(probs[place][None], *(x if x is None else x[own] for x in (k, p)))
            draft = int(drafts[place])
            if torch.rand((), generator=GENERATOR) * left.sum() < left[draft]:
                accepted[row] += 1
                continue
            left[draft] = 0
            recovered[row, number] = torch.multinomial(left, 1, generator=GENERATOR)
            break
        first = end
    return recovered, accepted


def _fake_rejection(drafts: Tensor, probs: Tensor, ends: Tensor, *rest: object) -> Any:
    batch = ends.shape[0]
    return drafts.new_empty((batch, drafts.shape[0] // batch)), drafts.new_empty(batch)


def _fake(logits: Tensor, *rest: object) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


define(RBLN, "argmax", "Tensor logits", argmax, _fake)
define(RBLN, "top_k_top_p", "Tensor probs, Tensor? k, Tensor? p", top_k_top_p, _fake)
define(
    RBLN,
    "rejection_sample",
    "Tensor draft_token_ids, Tensor target_probs, Tensor cu_num_draft_tokens, Tensor? top_k,"
    " Tensor? top_p",
    rejection_sample,
    _fake_rejection,
    result="(Tensor, Tensor)",
)
