"""KV caches of e4m3 (8-bit floats), with one scale for the keys and one for the values of a layer.

vLLM's layers hold the scales of the checkpoint, or 1.0 (``_k_scale``, ``_v_scale``); the attention
ops apply them (``attention.ops``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

E4M3_NAMES = ("fp8", "fp8_e4m3")
"""Values of ``--kv-cache-dtype`` that select them."""


def share_scales(layer: Any, owner: Any) -> None:
    """Copy to ``layer`` the scales of ``owner``, whose KV cache it reads."""
    layer._k_scale, layer._v_scale = owner._k_scale, owner._v_scale


def log_scales(layers: Mapping[str, Any]) -> None:
    """Log how many layers have scales from the checkpoint. Called after the weights are loaded."""
    found = [x for x in layers.values() if getattr(x, "kv_cache_dtype", None) in E4M3_NAMES]
    if not found:
        return
    pairs = [(x._k_scale.detach().item(), x._v_scale.detach().item()) for x in found]
    scaled = sum(pair != (1.0, 1.0) for pair in pairs)
    logger.info(
        "KV cache of float8_e4m3: %d of %d layers have scales from the checkpoint, the others 1.0; "
        "keys and values beyond 448 times the scale are clamped",
        *(scaled, len(found)),
    )
