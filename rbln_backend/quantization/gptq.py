"""GPTQ checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rbln_backend.quantization.expert_formats import GptqColumns
from rbln_backend.quantization.experts import RblnQuantizedMoEMethod
from rbln_backend.quantization.schemes import check_gptq
from rbln_backend.quantization.weights import Weights
from rbln_backend.vllm_compat.quantization import (
    AutoGPTQConfig,
    AutoGPTQLinearMethod,
    FusedMoEConfig,
    QuantizeMethodBase,
    RoutedExperts,
    get_linear_quant_method,
    get_moe_quant_method,
)

# Matches every layer's name, where the checkpoint's own list cannot be read.
_EVERY_LAYER = ""


class RblnGptqLinearMethod(AutoGPTQLinearMethod):
    """As upstream, without asking whether a GPU has Marlin."""

    def __init__(self, quant_config: AutoGPTQConfig) -> None:
        self.quant_config = quant_config
        self.input_dtype = None
        self.quant_type = quant_config.quant_type


class RblnGptqConfig(AutoGPTQConfig):
    """GPTQ checkpoints."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Upstream's, and float32."""
        return [torch.float32, *super().get_supported_act_dtypes()]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AutoGPTQConfig:
        """As upstream; raises ``UnsupportedModelError`` naming the field that cannot be."""
        check_gptq(config)
        return super().from_config(config)

    def maybe_update_config(self, *args: Any, **kwargs: Any) -> None:
        """Learn from the files which layers are quantised: all, where there are none to read."""
        super().maybe_update_config(*args, **kwargs)
        self.modules_in_block_to_quantize = self.modules_in_block_to_quantize or [_EVERY_LAYER]

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that multiplies by ``layer``'s weights; None for unquantized layers."""
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        method: QuantizeMethodBase | None = get_linear_quant_method(
            self, layer, prefix, RblnGptqLinearMethod
        )
        return method

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase | None:
        listed = self.modules_in_block_to_quantize
        if not any(name == _EVERY_LAYER or ".experts." in name for name in listed):
            return None
        method: QuantizeMethodBase = get_moe_quant_method(self, layer, prefix, RblnGptqMoEMethod)
        return method


class RblnGptqMoEMethod(RblnQuantizedMoEMethod):
    """Experts of a GPTQ checkpoint."""

    def __init__(self, config: AutoGPTQConfig, moe: FusedMoEConfig) -> None:
        weights = Weights(bits=config.quant_type.size_bits, group_size=config.group_size)
        stored = GptqColumns(weights)
        super().__init__(moe, stored, stored)
