"""KV caches of e4m3: floats of a byte, each layer's keys and values with a scale of their own.

vLLM's layers have the scales, as the checkpoint gives them or 1.0 (``_k_scale``, ``_v_scale``); the
attention ops apply them (``attention.ops``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

E4M3_NAMES = ("fp8", "fp8_e4m3")
"""What ``--kv-cache-dtype`` calls them."""


def share_scales(reader: Any, owner: Any) -> None:
    """Let a layer read another's cache by the scales with which that one writes it."""
    reader._k_scale, reader._v_scale = owner._k_scale, owner._v_scale


def tell_scales(layers: Mapping[str, Any]) -> None:
    """Log whose scales apply, once all weights are there."""
    found = [x for x in layers.values() if getattr(x, "kv_cache_dtype", None) in E4M3_NAMES]
    if not found:
        return
    pairs = [(x._k_scale.detach().item(), x._v_scale.detach().item()) for x in found]
    scaled = sum(pair != (1.0, 1.0) for pair in pairs)
    logger.info(
        "KV cache of float8_e4m3: %d of %d layers have scales from the checkpoint, the others 1.0; "
        "keys and values beyond 448 times that are cut off there",
        *(scaled, len(found)),
    )
