"""Checkpoints of e4m3 weights: the method fp8, in blocks as DeepSeek publishes, and ModelOpt's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from rbln_backend.quantization.byte_linear import ByteWeights, RblnByteScheme
from rbln_backend.quantization.expert_formats import ByteRows
from rbln_backend.quantization.experts import RblnQuantizedMoEMethod
from rbln_backend.quantization.schemes import NVFP4, check_fp8, check_modelopt
from rbln_backend.quantization.sdk.nvfp4 import RblnModelOptNvfp4MoEMethod
from rbln_backend.unsupported import QUANTIZATION
from rbln_backend.vllm_compat.quantization import (
    Attention,
    CompressedTensorsLinearMethod,
    Fp8Config,
    LinearBase,
    ModelOptFp8Config,
    ModelOptMixedPrecisionConfig,
    QuantizeMethodBase,
    RoutedExperts,
    UnquantizedLinearMethod,
    is_layer_skipped,
)

_MODELOPT = ByteWeights(
    is_float=True, scope="tensor", dropped=("input_scale",), published="FP8 W8A8"
)


class RblnFp8Config(Fp8Config):
    """Weights of e4m3; activations are in the model's dtype."""

    def __init__(
        self, *args: Any, weight_block_size: Sequence[int] | None = None, **options: Any
    ) -> None:
        # Under upstream's name vLLM would switch on an operator of its own for blocks.
        super().__init__(*args, **options)
        self._block = None if weight_block_size is None else tuple(weight_block_size)

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Upstream's, and float32."""
        return [torch.float32, *super().get_supported_act_dtypes()]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp8Config:
        """As upstream; raises ``UnsupportedModelError`` naming the field that cannot be."""
        check_fp8(config)
        return super().from_config(config)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that multiplies by ``layer``'s weights; None for unquantized layers."""
        if not self.is_checkpoint_fp8_serialized:
            raise QUANTIZATION.refusal("quantization 'fp8' of a checkpoint that is not")
        if isinstance(layer, Attention):
            # Scales of a quantised KV cache are read, and mean nothing to one that is not.
            return super().get_quant_method(layer, prefix)
        if not isinstance(layer, LinearBase | RoutedExperts):
            return None
        skipped = is_layer_skipped(
            prefix,
            self.ignored_layers,
            self.packed_modules_mapping,
            match_mode=self.ignored_layers_match_mode,
        )
        if isinstance(layer, RoutedExperts):
            stored = ByteRows.of(self._stored())
            return None if skipped else RblnQuantizedMoEMethod(layer.moe_config, stored, stored)
        if skipped:
            return UnquantizedLinearMethod()
        # The method does what the layer's scheme says.
        scheme: Any = RblnByteScheme(self._stored(), prefix)
        layer.scheme = scheme
        return CompressedTensorsLinearMethod(cast(Any, self))

    def _stored(self) -> ByteWeights:
        dropped = ("input_scale",) if self.activation_scheme == "static" else ()
        rest: dict[str, Any] = {"is_float": True, "dropped": dropped, "published": "FP8 W8A8"}
        if self._block is None:
            return ByteWeights(scope="tensor", **rest)
        rows, inputs = self._block
        return ByteWeights(
            scope="block", block=(rows, inputs), scale_name="weight_scale_inv", **rest
        )


class RblnModelOptConfig(ModelOptFp8Config):
    """Weights of e4m3 that ModelOpt wrote, with a scale for each stored layer."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Upstream's, and float32."""
        return [torch.float32, *super().get_supported_act_dtypes()]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """As upstream; raises ``UnsupportedModelError`` naming the field that cannot be."""
        check_modelopt(config)
        return super().from_config(config)

    def has_blocked_weights(self) -> bool:
        """No: vLLM would switch on an operator of its own for blocks."""
        return False

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that multiplies by ``layer``'s weights; None for unquantized layers."""
        if isinstance(layer, Attention):
            # Scales of a quantised KV cache are read, and mean nothing to one that is not.
            return super().get_quant_method(layer, prefix)
        return _method_of_modelopt(layer, prefix, is_skipped=self.is_layer_excluded(prefix))


class RblnModelOptMixedConfig(ModelOptMixedPrecisionConfig):
    """As ``RblnModelOptConfig``, of the layers that ``quantized_layers`` lists."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Upstream's, and float32."""
        return [torch.float32, *super().get_supported_act_dtypes()]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """As upstream; raises ``UnsupportedModelError`` naming the field that cannot be."""
        check_modelopt(config)
        return super().from_config(config)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that multiplies by ``layer``'s weights; None for unquantized layers."""
        if isinstance(layer, Attention):
            return super().get_quant_method(layer, prefix)
        algorithm = self._resolve_quant_algo(prefix)
        is_skipped = self.is_layer_excluded(prefix) or algorithm is None
        if algorithm in NVFP4 and not is_skipped:
            if not isinstance(layer, RoutedExperts):
                raise QUANTIZATION.refusal(f"{prefix} in {algorithm}")
            return RblnModelOptNvfp4MoEMethod(layer.moe_config, self.nvfp4_config.group_size)
        return _method_of_modelopt(layer, prefix, is_skipped=is_skipped)


def _method_of_modelopt(
    layer: nn.Module, prefix: str, *, is_skipped: bool
) -> QuantizeMethodBase | None:
    if isinstance(layer, RoutedExperts):
        stored = ByteRows.of(_MODELOPT)
        return None if is_skipped else RblnQuantizedMoEMethod(layer.moe_config, stored, stored)
    if not isinstance(layer, LinearBase):
        return None
    if is_skipped:
        return UnquantizedLinearMethod()
    # The method does what the layer's scheme says.
    scheme: Any = RblnByteScheme(_MODELOPT, prefix)
    layer.scheme = scheme
    # Of its configuration the method reads nothing.
    return CompressedTensorsLinearMethod(cast(Any, None))
