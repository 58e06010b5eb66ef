"""KV caches of 8-bit floats, with one scale for the keys and one for the values of a layer.

vLLM's layers hold the scales of the checkpoint, or 1.0 (``_k_scale``, ``_v_scale``); the attention
ops apply them (``layers.attention_ops``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

logger = logging.getLogger(__name__)

FP8_DTYPES: Mapping[str, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Dtype of the cache by the value of ``--kv-cache-dtype`` that selects it."""


def share_scales(layer: Any, owner: Any) -> None:
    layer._k_scale, layer._v_scale = owner._k_scale, owner._v_scale


def log_scales(layers: Mapping[str, Any]) -> None:
    """Log how many layers have scales from the checkpoint. Called after the weights are loaded."""
    found = [x for x in layers.values() if getattr(x, "kv_cache_dtype", None) in FP8_DTYPES]
    if not found:
        return
    pairs = [(x._k_scale.detach().item(), x._v_scale.detach().item()) for x in found]
    scaled = sum(pair != (1.0, 1.0) for pair in pairs)
    dtype = FP8_DTYPES[found[0].kv_cache_dtype]
    # What an NPU does to larger numbers of e5m2 is unknown.
    largest = "; keys and values beyond 448 times the scale are clamped"
    logger.info(
        "KV cache of %s: %d of %d layers have scales from the checkpoint, the others 1.0%s",
        str(dtype).removeprefix("torch."),
        scaled,
        len(found),
        largest if dtype == torch.float8_e4m3fn else "",
    )
