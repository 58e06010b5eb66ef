"""vLLM's readers of quantised checkpoints, narrowed to what this backend multiplies by.

vLLM's registries of quantisation configs and of linear kernels are open to platforms: nothing is
replaced but entries of the first. Names, files and weight loading stay upstream's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.auto_awq import (
    AutoAWQConfig,
    AutoAWQMarlinLinearMethod,
)
from vllm.model_executor.layers.quantization.auto_gptq import (
    AutoGPTQConfig,
    AutoGPTQLinearMethod,
    get_moe_quant_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptFp8Config,
    ModelOptMixedPrecisionConfig,
)
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_linear_quant_method
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import PlatformEnum

from rbln_backend.layers.experts import SWIGLU_ALPHA, SWIGLU_LIMIT, ExpertAdapters
from rbln_backend.layers.quantized_experts import (
    AwqColumns,
    ByteRows,
    ExpertFormat,
    GptqColumns,
    Mxfp4Rows,
    PackedRows,
    RblnQuantizedMoEMethod,
    words_along_inputs,
    zero_points,
)
from rbln_backend.layers.quantized_linear import ByteWeights, RblnByteScheme, RblnWna16LinearKernel
from rbln_backend.layers.schemes import (
    AWQ,
    BYTE_FORMATS,
    CHANNEL,
    COMPRESSED_TENSORS,
    FP8,
    GPTQ,
    MODELOPT,
    MODELOPT_MIXED,
    MXFP4,
    NVFP4,
    Weights,
    check_awq,
    check_compressed_tensors,
    check_fp8,
    check_gptq,
    check_modelopt,
)
from rbln_backend.layers.sdk_experts import OneOpMoEMethod, RblnModelOptNvfp4MoEMethod
from rbln_backend.limits import QUANTIZATION, QUANTIZED_EMBEDDING, QUANTIZED_EXPERTS


class _Narrowed:
    """Put before vLLM's configurations: fields are checked, and activations may be float32."""

    # Raises ``UnsupportedModelError`` naming the field that cannot be.
    check: staticmethod[[Mapping[str, Any]], None]

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        upstream: Any = super()
        return [torch.float32, *upstream.get_supported_act_dtypes()]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        cls.check(config)
        upstream: Any = super()
        return upstream.from_config(config)


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


class RblnAwqConfig(_Narrowed, AutoAWQConfig):
    """AWQ checkpoints."""

    check = staticmethod(check_awq)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
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


# Matches every layer's name, where the checkpoint's own list cannot be read.
_EVERY_LAYER = ""


class RblnGptqLinearMethod(AutoGPTQLinearMethod):
    """As upstream, without asking whether a GPU has Marlin."""

    def __init__(self, quant_config: AutoGPTQConfig) -> None:
        self.quant_config = quant_config
        self.input_dtype = None
        self.quant_type = quant_config.quant_type


class RblnGptqConfig(_Narrowed, AutoGPTQConfig):
    """GPTQ checkpoints."""

    check = staticmethod(check_gptq)

    def maybe_update_config(self, *args: Any, **kwargs: Any) -> None:
        """Learn from the files which layers are quantised: all, where there are none to read."""
        super().maybe_update_config(*args, **kwargs)
        self.modules_in_block_to_quantize = self.modules_in_block_to_quantize or [_EVERY_LAYER]

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
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


class RblnCompressedTensorsConfig(_Narrowed, CompressedTensorsConfig):
    """As upstream, with schemes of our own for weights of a byte each."""

    check = staticmethod(check_compressed_tensors)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        is_embedding = isinstance(layer, VocabParallelEmbedding)
        if is_embedding and not isinstance(layer, ParallelLMHead):
            scheme = self.get_scheme_dict(layer, layer_name=prefix)
            if scheme and scheme.get("weights") is not None:
                raise QUANTIZED_EMBEDDING.refusal(prefix)
        return super().get_quant_method(layer, prefix)

    def has_blocked_weights(self) -> bool:
        """vLLM asks to switch on an operator of its own for them, which there is no need of."""
        return False

    def _get_scheme_from_parts(
        self,
        weight_quant: Any,
        input_quant: Any,
        output_quant: Any = None,
        format: str | None = None,
        layer_name: str | None = None,
    ) -> CompressedTensorsScheme:
        written = format or self.quant_format
        if written in BYTE_FORMATS:
            return RblnByteScheme(_stored(weight_quant, input_quant), str(layer_name))
        return super()._get_scheme_from_parts(
            weight_quant, input_quant, output_quant, format, layer_name
        )

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase | None:
        # As upstream: linear layers, one of each expert, are what the fields speak of.
        self._add_fused_moe_to_target_scheme_map()  # type: ignore[no-untyped-call]
        gate, up, down = (
            self.get_scheme_dict(layer, f"{prefix}.0.{name}_proj")
            for name in ("gate", "up", "down")
        )
        # Gate and up projections are one matrix.
        if gate != up or (gate is None) != (down is None):
            raise QUANTIZED_EXPERTS.refusal(f"{prefix}, whose projections differ in their format")
        if gate is None or down is None:
            return None
        return RblnQuantizedMoEMethod(layer.moe_config, _expert_format(gate), _expert_format(down))


def _expert_format(scheme: dict[str, Any]) -> ExpertFormat:
    weights = scheme["weights"]
    if scheme["format"] in BYTE_FORMATS:
        return ByteRows.of(_stored(weights, scheme["input_activations"]))
    return PackedRows(
        Weights(
            bits=weights.num_bits,
            group_size=weights.group_size or CHANNEL,
            symmetric=weights.symmetric,
        )
    )


def _stored(weights: Any, activations: Any) -> ByteWeights:
    """Parse the checkpoint's own description; logs that activations are not quantized."""
    is_float = weights.type == "float"
    published, dropped = "", []
    if activations is not None:
        published = "FP8 W8A8" if is_float else "W8A8"
        if not activations.dynamic:
            dropped.append("input_scale")
            if not activations.symmetric:
                dropped.append("input_zero_point")
    block = tuple(weights.block_structure or (1, 0))
    return ByteWeights(
        is_float=is_float,
        scope=weights.strategy,
        block=(int(block[0]), int(block[1])),
        dropped=tuple(dropped),
        published=published,
    )


_MODELOPT = ByteWeights(
    is_float=True, scope="tensor", dropped=("input_scale",), published="FP8 W8A8"
)


class RblnFp8Config(_Narrowed, Fp8Config):
    """Weights of e4m3; activations are in the model's dtype."""

    def __init__(
        self, *args: Any, weight_block_size: Sequence[int] | None = None, **options: Any
    ) -> None:
        # Under upstream's name vLLM would switch on an operator of its own for blocks.
        super().__init__(*args, **options)
        self._block = None if weight_block_size is None else tuple(weight_block_size)

    check = staticmethod(check_fp8)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
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


class RblnModelOptConfig(_Narrowed, ModelOptFp8Config):
    """Weights of e4m3 that ModelOpt wrote, with a scale for each stored layer."""

    check = staticmethod(check_modelopt)

    def has_blocked_weights(self) -> bool:
        """No: vLLM would switch on an operator of its own for blocks."""
        return False

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, Attention):
            # Scales of a quantised KV cache are read, and mean nothing to one that is not.
            return super().get_quant_method(layer, prefix)
        return _method_of_modelopt(layer, prefix, is_skipped=self.is_layer_excluded(prefix))


class RblnModelOptMixedConfig(_Narrowed, ModelOptMixedPrecisionConfig):
    """As ``RblnModelOptConfig``, of the layers that ``quantized_layers`` lists."""

    check = staticmethod(check_modelopt)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
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


# Weights that share an exponent, by the Open Compute Project's MX specification.
_BLOCK = 32
# As vllm-rbln 0.12 checks it (quantization/mxfp4.py).
_SDK_COLUMNS = 64


class Mxfp4Experts:
    """Experts of e2m1 as an NPU keeps them: blocks, scales and biases of three projections."""

    adapters: ExpertAdapters | None = None

    def __init__(self, layer: Any) -> None:
        self._parts = [
            getattr(layer, f"{part}_proj_{kind}")
            for part in ("gate", "up", "down")
            for kind in ("blocks", "scales", "bias")
        ]
        self.count: int = self._parts[0].shape[0]

    def glu(self, x: Tensor, by_expert: Tensor, expert_map: Tensor | None) -> Tensor:
        alpha = torch.tensor(SWIGLU_ALPHA, dtype=torch.float32)
        limit = torch.tensor(SWIGLU_LIMIT, dtype=torch.float32)
        mixed: Tensor = torch.ops.rbln_custom_ops.custom_moe_glu_mxfp4(
            x, *self._parts, by_expert, alpha, limit, expert_map
        )
        return mixed


class RblnMxfp4MoEMethod(OneOpMoEMethod):
    """Experts of a gpt-oss checkpoint."""

    weight_dtype = "gpt_oss_mxfp4"
    """Name that the model's own loader requires."""

    form = "MXFP4"
    sdk_op = "custom_moe_glu_mxfp4"

    def __init__(self, moe: FusedMoEConfig) -> None:
        stored = Mxfp4Rows(Weights(bits=4, group_size=_BLOCK, kind="float"))
        super().__init__(moe, stored, stored)

    def has_sdk_form(self, inner: int) -> bool:
        """As ``RblnQuantizedMoEMethod``; vllm-rbln 0.12 requires 64 columns and biases."""
        return inner % _SDK_COLUMNS == 0 and bool(self.moe.has_bias)

    def keep_stored(self, layer: Any) -> None:
        """Keep fields and exponents; gate and up rows alternate in a checkpoint."""
        for source, target in (("weight", "blocks"), ("weight_scale", "scales"), ("bias", "bias")):
            both = layer._parameters.pop(f"w13_{source}").data
            down = layer._parameters.pop(f"w2_{source}").data
            rows = {"gate": both[:, ::2], "up": both[:, 1::2], "down": down}
            for part, value in rows.items():
                parameter = nn.Parameter(value.contiguous(), requires_grad=False)
                layer.register_parameter(f"{part}_proj_{target}", parameter)
        for name in ("w13_bias", "w2_bias"):
            # vLLM's description of the layer reads them.
            layer.register_parameter(name, None)
        self.hold(layer, Mxfp4Experts(layer))


class RblnMxfp4Config(GptOssMxfp4Config):
    """As upstream, with a method of our own for experts."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Upstream's, and the others that there are kernels for."""
        return [torch.float32, torch.float16, *super().get_supported_act_dtypes()]

    def _make_moe_method(self, moe: FusedMoEConfig) -> RblnMxfp4MoEMethod:
        return RblnMxfp4MoEMethod(moe)


_CONFIGS: Mapping[str, Any] = {
    COMPRESSED_TENSORS: RblnCompressedTensorsConfig,
    GPTQ: RblnGptqConfig,
    AWQ: RblnAwqConfig,
    FP8: RblnFp8Config,
    MXFP4: RblnMxfp4Config,
    MODELOPT: RblnModelOptConfig,
    MODELOPT_MIXED: RblnModelOptMixedConfig,
}
_HOLDERS = (RblnWna16LinearKernel, RblnByteScheme)


@cache
def register() -> None:
    """Register the configurations above with vLLM in this process; idempotent."""
    register_linear_kernel(RblnWna16LinearKernel, PlatformEnum.OOT)
    for name, config in _CONFIGS.items():
        register_quantization_config(name)(config)


def quantized_layers(model: nn.Module) -> list[str]:
    return [held for layer in model.modules() for held in _held_by(layer)]


def _held_by(layer: nn.Module) -> Iterator[str]:
    method = getattr(layer, "quant_method", None)
    if isinstance(method, RblnQuantizedMoEMethod):
        yield str(method)
        return
    # The method knows, or holds the kernel, or the layer the scheme, which may have a kernel.
    scheme = getattr(layer, "scheme", None)
    holders = (method, getattr(method, "kernel", None), scheme, getattr(scheme, "kernel", None))
    yield from (str(h.weights) for h in holders if isinstance(h, _HOLDERS))
