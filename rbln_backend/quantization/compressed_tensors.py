"""compressed-tensors checkpoints: words of packed integers, or a byte for each weight."""

from __future__ import annotations

from typing import Any

from torch import nn

from rbln_backend.quantization.byte_linear import ByteWeights, RblnByteScheme
from rbln_backend.quantization.expert_formats import ByteRows, ExpertFormat, PackedRows
from rbln_backend.quantization.experts import RblnQuantizedMoEMethod
from rbln_backend.quantization.schemes import BYTE_FORMATS, check_compressed_tensors
from rbln_backend.quantization.weights import CHANNEL, Weights
from rbln_backend.unsupported import QUANTIZED_EMBEDDING, QUANTIZED_EXPERTS
from rbln_backend.vllm_compat.quantization import (
    CompressedTensorsConfig,
    CompressedTensorsScheme,
    ParallelLMHead,
    QuantizeMethodBase,
    RoutedExperts,
    VocabParallelEmbedding,
)


class RblnCompressedTensorsConfig(CompressedTensorsConfig):
    """As upstream, with schemes of our own for weights of a byte each."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressedTensorsConfig:
        """As upstream; raises ``UnsupportedModelError`` naming the field that cannot be."""
        check_compressed_tensors(config)
        return super().from_config(config)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that multiplies by ``layer``'s weights; None for unquantized layers."""
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
