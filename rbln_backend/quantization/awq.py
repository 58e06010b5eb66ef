"""AWQ checkpoints of the version "gemm": AutoAWQ's, and those that others write like it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from rbln_backend.quantization.awq_order import words_along_inputs, zero_points
from rbln_backend.quantization.expert_formats import AwqColumns
from rbln_backend.quantization.experts import RblnQuantizedMoEMethod
from rbln_backend.quantization.schemes import check_awq
from rbln_backend.quantization.weights import Weights
from rbln_backend.vllm_compat.quantization import (
    AutoAWQConfig,
    AutoAWQMarlinLinearMethod,
    LinearBase,
    ParallelLMHead,
    QuantizeMethodBase,
    RoutedExperts,
    UnquantizedLinearMethod,
    is_layer_skipped,
    set_weight_attrs,
)


class RblnAwqLinearMethod(AutoAWQMarlinLinearMethod):
    """As upstream's for any kernel, without asking whether a GPU has Marlin."""

    def __init__(self, quant_config: AutoAWQConfig) -> None:
        self.quant_config = quant_config
        self.quant_type = quant_config.quant_type
        self.input_dtype = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring AWQ's order into that of GPTQ, which the kernel takes; one layer's copy at most."""
        words = nn.Parameter(words_along_inputs(layer.qweight.data), requires_grad=False)
        set_weight_attrs(words, {"packed_dim": 0})
        layer.register_parameter("qweight", words)
        zeros = zero_points(layer.qzeros.data)
        layer.register_parameter("qzeros", nn.Parameter(zeros, requires_grad=False))
        self.kernel.process_weights_after_loading(layer)


class RblnAwqConfig(AutoAWQConfig):
    """AWQ checkpoints."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Upstream's, and float32."""
        return [torch.float32, *super().get_supported_act_dtypes()]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AutoAWQConfig:
        """As upstream; raises ``UnsupportedModelError`` naming the field that cannot be."""
        check_awq(config)
        return super().from_config(config)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that multiplies by ``layer``'s weights; None for unquantized layers."""
        is_head = isinstance(layer, ParallelLMHead) and self.lm_head_quantized
        is_linear = isinstance(layer, LinearBase) or is_head
        if not (is_linear or isinstance(layer, RoutedExperts)):
            return None
        kept, fused = self.modules_to_not_convert, self.packed_modules_mapping
        if is_layer_skipped(prefix, kept, fused, match_mode="substring"):
            return UnquantizedLinearMethod() if is_linear else None
        if is_linear:
            return RblnAwqLinearMethod(self)
        weights = Weights(bits=self.weight_bits, group_size=self.group_size, symmetric=False)
        stored, moe = AwqColumns(weights), cast(RoutedExperts, layer).moe_config
        return RblnQuantizedMoEMethod(moe, stored, stored)
