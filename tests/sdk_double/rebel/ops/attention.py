"""Causal and masked attention over a paged cache: the ``*_naive_*`` ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rebel.ops.library import CUSTOM, SORTED, define
from rebel.ops.paged import Cache, check_paged, run_paged
from torch import Tensor

_QKV = "Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, "
_FLASH_CAUSAL = (
    _QKV + "Tensor scale, Tensor seq_idx, Tensor block_tables, Tensor slot_mapping, Tensor? sinks, "
    "Tensor? k_scale, Tensor? v_scale, ScalarType? cache_dtype"
)
_CAUSAL = _QKV + "Tensor seq_idx, Tensor scale, Tensor block_tables, Tensor dummy, Tensor? sinks"
_FLASH_MASKED = (
    _QKV + "Tensor mask, Tensor scale, Tensor seq_idx, Tensor block_tables, Tensor dummy, "
    "Tensor? sinks"
)
_MASKED = (
    _QKV + "Tensor mask, Tensor seq_idx, Tensor scale, Tensor block_tables, Tensor dummy, "
    "Tensor? sinks"
)


def flash_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    scale: Tensor,
    seq_idx: Tensor,
    tables: Tensor,
    slot_mapping: Tensor,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    cache_dtype: torch.dtype | None = None,
) -> Tensor:
    """``flash_causal_attention_naive_*``: many blocks a request."""
    cache = Cache.of(kv_cache, cache_dtype, k_scale, v_scale)
    return run_paged(q, k, v, cache, scale, seq_idx, tables, sinks=sinks)


def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    seq_idx: Tensor,
    scale: Tensor,
    tables: Tensor,
    dummy: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """``causal_attention_naive_*``: one block holds a request."""
    return run_paged(q, k, v, Cache(kv_cache), scale, seq_idx, tables, sinks=sinks)


def flash_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    mask: Tensor,
    scale: Tensor,
    seq_idx: Tensor,
    tables: Tensor,
    dummy: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """``flash_attention_naive_*``: what a token sees is a mask of zeros and ones."""
    return run_paged(q, k, v, Cache(kv_cache), scale, seq_idx, tables, sinks=sinks, mask=mask)


def masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    mask: Tensor,
    seq_idx: Tensor,
    scale: Tensor,
    tables: Tensor,
    dummy: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """``attention_naive_*``: the masked op for one block a request."""
    return run_paged(q, k, v, Cache(kv_cache), scale, seq_idx, tables, sinks=sinks, mask=mask)


def _checked(
    run: Callable[..., Tensor], places: tuple[int, int], *, is_prefill: bool
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Body and fake of an op whose ``seq_idx`` and ``block_tables`` are at ``places``."""
    idx, table = places

    def body(*arguments: Any) -> Tensor:
        check_paged(*(arguments[n] for n in (0, 3, idx, table)), is_prefill=is_prefill)
        return run(*arguments)

    def fake(*arguments: Any) -> Tensor:
        check_paged(*(arguments[n] for n in (0, 3, idx, table)), is_prefill=is_prefill)
        return torch.empty_like(arguments[0])

    return body, fake


for _name, _arguments, _run, _places in (
    ("flash_causal_attention_naive", _FLASH_CAUSAL, flash_causal, (5, 6)),
    ("causal_attention_naive", _CAUSAL, causal, (4, 6)),
    ("flash_attention_naive", _FLASH_MASKED, flash_masked, (6, 7)),
    ("attention_naive", _MASKED, masked, (5, 7)),
):
    for _phase in ("prefill", "decode"):
        _pair = _checked(_run, _places, is_prefill=_phase == "prefill")
        define(CUSTOM, f"{_name}_{_phase}", _arguments, *_pair, later=SORTED)
