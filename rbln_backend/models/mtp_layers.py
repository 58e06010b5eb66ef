"""vLLM's MTP layers, whose readers here map the scales of a layer's KV cache as others do.

vLLM maps their names in ``AutoWeightsLoader``, from a ``quant_config`` that these classes do not
hold, so that a checkpoint with scales of its MTP layer is an error there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.ernie_mtp import ErnieMTP
from vllm.model_executor.models.glm4_moe_mtp import Glm4MoeMTP
from vllm.model_executor.models.mimo_mtp import MiMoMTP


class _ReadsCacheScales:
    """Mixin: maps the names of scales before vLLM's class reads the checkpoint."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        quant_config = vllm_config.quant_config
        self._cache_scales = None if quant_config is None else quant_config.get_cache_scale_mapper()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        mapped = weights if self._cache_scales is None else self._cache_scales.apply(weights)
        return super().load_weights(mapped)  # type: ignore[misc]


class ScaledErnieMTP(_ReadsCacheScales, ErnieMTP):
    """ERNIE 4.5's MTP layer."""


class ScaledGlm4MoeMTP(_ReadsCacheScales, Glm4MoeMTP):
    """GLM-4.5's MTP layer."""


class ScaledMiMoMTP(_ReadsCacheScales, MiMoMTP):
    """MiMo's MTP layer."""
