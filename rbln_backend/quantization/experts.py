"""Experts over weights of 4 and 8 bits: their parameters while loading, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rbln_backend.emulator.quantized_packing import (
    pack_scales,
    pack_transposed_words,
    pack_words,
)
from rbln_backend.moe.experts import swiglu_oai
from rbln_backend.moe.layers import RblnMoEMethod
from rbln_backend.quantization.schemes import CHANNEL, Weights
from rbln_backend.unsupported import QUANTIZED_EXPERTS
from rbln_backend.vllm_compat.quantization import FusedMoEConfig, set_weight_attrs

Kept = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExpertFormat:
    """What a checkpoint's format calls an expert's tensors behind "w13_" and "w2_"."""

    words: str
    scales: str
    is_transposed: bool
    """Words are [K / fields, N] instead of [N, K / fields], and scales [groups, N]."""
    dropped: dict[str, Callable[[int, int, int, int], tuple[int, ...]]]
    """Tensors without a meaning for symmetric weights: their shape, given N, K, groups, fields."""


COMPRESSED_TENSORS_EXPERTS = ExpertFormat(
    words="weight_packed",
    scales="weight_scale",
    is_transposed=False,
    dropped={"weight_shape": lambda *_: (2,)},
)
GPTQ_EXPERTS = ExpertFormat(
    words="qweight",
    scales="scales",
    is_transposed=True,
    dropped={
        "qzeros": lambda n, _k, groups, fields: (groups, n // fields),
        "g_idx": lambda _n, k, _groups, _fields: (k,),
    },
)


class QuantizedExperts:
    """As ``PackedExperts`` of plain weights: stacked words and scales of w13 and w2."""

    def __init__(self, layer: Any, weights: Weights, names: ExpertFormat) -> None:
        self._w13 = [getattr(layer, f"w13_{name}") for name in (names.words, names.scales)]
        self._w2 = [getattr(layer, f"w2_{name}") for name in (names.words, names.scales)]
        self._biases = [getattr(layer, name, None) for name in ("w13_bias", "w2_bias")]
        self.weights = weights
        self.count: int = self._w13[0].shape[0]
        self.hidden_size: int = layer.hidden_size
        self.intermediate_size: int = layer.intermediate_size_per_partition
        self.activation: str = layer.activation.value

    def chosen(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """As ``Experts``."""
        ops = torch.ops.rbln_emulator
        mixed: Tensor = ops.quantized_moe(x, weights, ids, *self._arguments())
        return mixed

    def weighted(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """As ``Experts``."""
        ops = torch.ops.rbln_emulator
        mixed: Tensor = ops.quantized_moe_masked(x, weights, counts, *self._arguments())
        return mixed

    def expert(self, x: Tensor, number: int) -> Tensor:
        """As ``Experts``."""
        gate_up = self._linear(x, self._w13, self._biases[0], number, 2 * self.intermediate_size)
        if self.activation == "silu":
            inner = torch.ops.rbln_emulator.activate(gate_up, "silu", True)
        else:
            inner = swiglu_oai(gate_up)
        return self._linear(inner, self._w2, self._biases[1], number, self.hidden_size)

    def _arguments(self) -> tuple[Any, ...]:
        return (
            *(*self._w13, self._biases[0], *self._w2, self._biases[1]),
            *(self.weights.bits, self.intermediate_size, self.activation),
        )

    def _linear(
        self, x: Tensor, stack: list[Tensor], bias: Tensor | None, number: int, width: int
    ) -> Tensor:
        words, scales = stack
        of_expert = None if bias is None else bias[number]
        product: Tensor = torch.ops.rbln_emulator.quantized_linear(
            x, words[number], scales[number], of_expert, width, self.weights.bits
        )
        return product


class RblnQuantizedMoEMethod(RblnMoEMethod):
    """Gated experts of any top-k routing over packed weights; on the emulated device alone."""

    def __init__(self, moe: FusedMoEConfig, weights: Weights, names: ExpertFormat) -> None:
        super().__init__(moe)
        self.weights = weights
        self._names = names

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Parameters as vLLM's loader fills them; raises ``UnsupportedModelError``."""
        self.choose(layer)
        inner = intermediate_size_per_partition
        if self.is_npu or any(size % self._unit() for size in (hidden_size, inner)):
            raise QUANTIZED_EXPERTS.refusal(
                f"{layer.layer_name}: {self.weights}, sizes {hidden_size} and {inner}"
            )
        scope = "channel" if self.weights.group_size == CHANNEL else "group"
        attributes |= {"is_transposed": self._names.is_transposed, "quant_method": scope}
        for name, columns, depth in (("w13", 2 * inner, hidden_size), ("w2", hidden_size, inner)):
            for suffix, value in self._empty(columns, depth, params_dtype):
                stacked = value.new_zeros(num_experts, *value.shape)
                parameter = nn.Parameter(stacked, requires_grad=False)
                layer.register_parameter(f"{name}_{suffix}", parameter)
                set_weight_attrs(parameter, attributes)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring words and scales into the kernels' layout, and drop the rest."""
        names, transposed = self._names, self._names.is_transposed
        for matrix in ("w13", "w2"):
            _repack(layer, f"{matrix}_{names.words}", _words(transposed))
            _repack(layer, f"{matrix}_{names.scales}", _scales(transposed))
            for suffix in names.dropped:
                del layer._parameters[f"{matrix}_{suffix}"]
            # Some checkpoints have biases that their architecture does not know of.
            if f"{matrix}_bias" not in layer._loaded_expert_biases:
                layer.register_parameter(f"{matrix}_bias", None)
        self.hold(layer, QuantizedExperts(layer, self.weights, names))

    def _unit(self) -> int:
        group = self.weights.group_size
        return 32 // self.weights.bits if group == CHANNEL else group

    def _empty(self, columns: int, depth: int, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
        """By suffix, what one expert's matrix [columns, depth] consists of."""
        fields, names = 32 // self.weights.bits, self._names
        groups = 1 if self.weights.group_size == CHANNEL else depth // self.weights.group_size
        words, scales = (columns, depth // fields), (columns, groups)
        if names.is_transposed:
            words, scales = words[::-1], scales[::-1]
        return [
            (names.words, torch.empty(words, dtype=torch.int32)),
            (names.scales, torch.empty(scales, dtype=dtype)),
            ("bias", torch.empty(columns, dtype=dtype)),
            *(
                (suffix, torch.empty(shape(columns, depth, groups, fields), dtype=torch.int32))
                for suffix, shape in names.dropped.items()
            ),
        ]


def _words(transposed: bool) -> Kept:
    return pack_transposed_words if transposed else pack_words


def _scales(transposed: bool) -> Kept:
    # What GPTQ calls scales is transposed, as the packer wants it.
    return pack_transposed_words if transposed else pack_scales


def _repack(layer: Any, name: str, pack: Kept) -> None:
    stacked = getattr(layer, name).data
    packed = torch.stack([pack(matrix) for matrix in stacked])
    layer.register_parameter(name, nn.Parameter(packed, requires_grad=False))
