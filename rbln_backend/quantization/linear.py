"""Linear layers over weights of 4 and 8 bits, as vLLM's mixed-precision kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rbln_backend.devices.emulated.packing import (
    pack_scales,
    pack_transposed_words,
    pack_words,
    unpack_fields,
    unpack_numbers,
)
from rbln_backend.devices.port import device_capabilities
from rbln_backend.devices.rebel.environment import announce_quant_bits
from rbln_backend.quantization.sdk.forms import SDK_GROUP, dequantized_integers
from rbln_backend.quantization.weights import CHANNEL, Weights
from rbln_backend.unsupported import QUANTIZATION_ON_NPU
from rbln_backend.vllm_compat.quantization import MPLinearKernel, MPLinearLayerConfig
from rbln_backend.vllm_compat.surface import configured, get_current_vllm_config


class RblnWna16LinearKernel(MPLinearKernel):
    """Integers of 4 or 8 bits, activations of the model's dtype.

    The emulated device multiplies by the packed words as they are. An NPU's graph holds int8
    weights and the dequantisation that the SDK's compiler looks for.
    """

    def __init__(
        self,
        c: MPLinearLayerConfig,
        w_q_param_name: str,
        w_s_param_name: str,
        w_zp_param_name: str | None = None,
    ) -> None:
        super().__init__(c, w_q_param_name, w_s_param_name, w_zp_param_name)
        self.weights = _weights_of(c)
        rbln = configured(get_current_vllm_config())
        self._keeps_words = device_capabilities(rbln).packed_weights
        if not (self._keeps_words or self.weights.symmetric):
            raise QUANTIZATION_ON_NPU.refusal(str(self.weights))

    @classmethod
    def get_min_capability(cls) -> int:
        """No GPU has to have anything."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Return True if the layer is supported, else False and the documented reason."""
        weights = _weights_of(c)
        obstacle = weights.obstacle(may_have_zeros=True)
        if obstacle is not None:
            return False, obstacle[1]
        depth, unit = c.partition_weight_shape[0], weights.group_size
        if unit == CHANNEL:
            unit = 32 // weights.bits
        if depth % unit:
            return False, f"Input size {depth} of this rank is not a multiple of {unit}"
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Bring words and scales into the layout that they are read in, and drop the rest."""
        words, scales, zeros = self._get_weight_params(layer)
        # compressed-tensors has [N, K / fields] and [N, groups], GPTQ both transposed.
        has_rows = getattr(words, "packed_dim", 1) == 1
        by_row = scales.data if has_rows else scales.data.t()
        if self._keeps_words:
            packed = pack_words(words.data) if has_rows else pack_transposed_words(words.data)
            self._replace(layer, packed, pack_scales(by_row))
            if not self.weights.symmetric:
                assert zeros is not None, "vLLM makes them for weights that are not symmetric"
                points = _zero_points(zeros.data, self.weights)
                layer.register_parameter("zeros", _parameter(points))
        else:
            rows = words.data if has_rows else words.data.t().contiguous()
            announce_quant_bits(self.weights.bits)
            self._replace(
                layer, unpack_fields(rows, self.weights.bits), self._sdk_scales(by_row.contiguous())
            )
        # Symmetric weights have no zero points, whatever a GPTQ checkpoint says in their place.
        for name in (self.w_zp_name, "weight_shape"):
            if name is not None and name in layer._parameters:
                del layer._parameters[name]

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] to [..., N] of its dtype."""
        words, scales, _ = self._get_weight_params(layer)
        if not self._keeps_words:
            return torch.nn.functional.linear(x, dequantized_integers(words, scales, x.dtype), bias)
        zeros = None if self.weights.symmetric else layer.zeros
        columns, written = self.config.partition_weight_shape[1], self.weights.format
        out: Tensor = torch.ops.rbln_emulator.quantized_linear(
            x, words, scales, zeros, bias, columns, written
        )
        return out

    def _replace(self, layer: nn.Module, words: Tensor, scales: Tensor) -> None:
        for name, value in ((self.w_q_name, words), (self.w_s_name, scales)):
            layer.register_parameter(name, _parameter(value))

    def _sdk_scales(self, scales: Tensor) -> Tensor:
        """[N, groups] as the SDK wants them: [N, K / 64, 1], or [N, 1] per channel."""
        if self.weights.group_size == CHANNEL:
            return scales
        repeats = self.weights.group_size // SDK_GROUP
        return scales.repeat_interleave(repeats, dim=1).unsqueeze(-1)


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def _zero_points(zeros: Tensor, weights: Weights) -> Tensor:
    """uint8 [groups, N], or words int32 [N / fields, groups] of neighbours along N, as panels."""
    if zeros.dtype == torch.int32:
        by_group = unpack_numbers(zeros.t().contiguous(), weights.bits)
        return pack_transposed_words(by_group.to(torch.uint8))
    return pack_transposed_words(zeros)


def _weights_of(c: MPLinearLayerConfig) -> Weights:
    """vLLM's description in our words; types with an offset have no zero points."""
    return Weights(
        bits=c.weight_type.size_bits,
        group_size=CHANNEL if c.group_size == c.full_weight_shape[0] else c.group_size,
        symmetric=not c.zero_points and c.weight_type.has_bias(),
        kind="int" if c.weight_type.is_integer() else "float",
    )
