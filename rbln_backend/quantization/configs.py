"""vLLM's readers of quantised checkpoints, narrowed to what this backend multiplies by.

vLLM's registries of quantisation configs and of linear kernels are open to platforms: nothing is
replaced but entries of the first. Names, files and weight loading stay upstream's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from rbln_backend.quantization.experts import (
    COMPRESSED_TENSORS_EXPERTS,
    GPTQ_EXPERTS,
    RblnQuantizedMoEMethod,
)
from rbln_backend.quantization.linear import RblnWna16LinearKernel
from rbln_backend.quantization.schemes import (
    CHANNEL,
    COMPRESSED_TENSORS,
    GPTQ,
    Weights,
    check_compressed_tensors,
    check_gptq,
)
from rbln_backend.unsupported import QUANTIZED_EMBEDDING, QUANTIZED_EXPERTS
from rbln_backend.vllm_compat.quantization import (
    AutoGPTQConfig,
    AutoGPTQLinearMethod,
    CompressedTensorsConfig,
    FusedMoEConfig,
    ParallelLMHead,
    PlatformEnum,
    QuantizeMethodBase,
    RoutedExperts,
    VocabParallelEmbedding,
    get_linear_quant_method,
    get_moe_quant_method,
    register_linear_kernel,
    register_quantization_config,
)

# Matches every layer's name, where the checkpoint's own list cannot be read.
_EVERY_LAYER = ""


class RblnCompressedTensorsConfig(CompressedTensorsConfig):
    """compressed-tensors checkpoints in the format pack-quantized."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressedTensorsConfig:
        """As upstream; raises ``UnsupportedModelError`` naming the field that cannot be."""
        check_compressed_tensors(config)
        return super().from_config(config)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """What multiplies by ``layer``'s weights; None for layers that are as they are."""
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        is_embedding = isinstance(layer, VocabParallelEmbedding)
        if is_embedding and not isinstance(layer, ParallelLMHead):
            scheme = self.get_scheme_dict(layer, layer_name=prefix)
            if scheme and scheme.get("weights") is not None:
                raise QUANTIZED_EMBEDDING.refusal(prefix)
        return super().get_quant_method(layer, prefix)

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase | None:
        # As upstream: linear layers, one of each expert, are what the fields speak of.
        self._add_fused_moe_to_target_scheme_map()  # type: ignore[no-untyped-call]
        names = [f"{prefix}.0.{name}_proj" for name in ("gate", "up", "down")]
        schemes = [self.get_scheme_dict(layer, name) for name in names]
        if schemes.count(schemes[0]) != len(schemes):
            raise QUANTIZED_EXPERTS.refusal(f"{prefix}, whose projections differ in their format")
        weights: Any = schemes[0] and schemes[0].get("weights")
        if not weights:
            return None
        return RblnQuantizedMoEMethod(
            layer.moe_config,
            Weights(bits=weights.num_bits, group_size=weights.group_size or CHANNEL),
            COMPRESSED_TENSORS_EXPERTS,
        )


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
        """What multiplies by ``layer``'s weights; None for layers that are as they are."""
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
        super().__init__(moe, weights, GPTQ_EXPERTS)


@cache
def register() -> None:
    """Let vLLM find the above in this process; idempotent."""
    register_linear_kernel(RblnWna16LinearKernel, PlatformEnum.OOT)
    register_quantization_config(COMPRESSED_TENSORS)(RblnCompressedTensorsConfig)
    register_quantization_config(GPTQ)(RblnGptqConfig)


def quantized_layers(model: nn.Module) -> list[str]:
    """How each quantised layer's weights are held, in the model's order; experts count as one."""
    return [held for layer in model.modules() for held in _held_by(layer)]


def _held_by(layer: nn.Module) -> Iterator[str]:
    method = getattr(layer, "quant_method", None)
    if isinstance(method, RblnQuantizedMoEMethod):
        yield f"{method.weights} experts"
    elif method is not None:
        # The method holds the kernel, or the scheme that the method looks up.
        for owner in (method, getattr(layer, "scheme", None)):
            kernel = getattr(owner, "kernel", None)
            if isinstance(kernel, RblnWna16LinearKernel):
                yield str(kernel.weights)
