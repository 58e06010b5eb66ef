"""Experts over weights of 4 and 8 bits: their parameters while loading, and what is kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rbln_backend.moe.experts import ExpertAdapters, swiglu_oai
from rbln_backend.moe.layers import RblnMoEMethod
from rbln_backend.quantization.expert_formats import ByteRows, ExpertFormat, Packed
from rbln_backend.quantization.sdk.block_experts import BLOCKS_OP, BYTES_OP, BlockExperts
from rbln_backend.unsupported import QUANTIZED_EXPERTS
from rbln_backend.vllm_compat.quantization import FusedMoEConfig, set_weight_attrs


class _Stack(NamedTuple):
    """One matrix of every expert, as the kernels read them."""

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    format: str

    @classmethod
    def of(cls, layer: Any, name: str, written: str) -> _Stack:
        """The parameters of ``layer`` that begin with ``name``."""
        parts = [getattr(layer, f"{name}_{part}", None) for part in (*Packed._fields, "bias")]
        return cls._make([*parts, written])

    def product(self, x: Tensor, number: int, width: int) -> Tensor:
        """x [T, K] times one expert's matrix: [T, width]."""
        parts = [
            None if part is None else part[number]
            for part in (self.words, self.scales, self.zeros, self.bias)
        ]
        product: Tensor = torch.ops.rbln_emulator.quantized_linear(x, *parts, width, self.format)
        return product


class QuantizedExperts:
    """As ``PackedExperts`` of plain weights: what was packed of w13 and w2, stacked."""

    adapters: ExpertAdapters | None = None

    def __init__(self, layer: Any, w13_format: str, w2_format: str) -> None:
        self._w13 = _Stack.of(layer, "w13", w13_format)
        self._w2 = _Stack.of(layer, "w2", w2_format)
        self.count: int = self._w13.words.shape[0]
        self.hidden_size: int = layer.hidden_size
        self.intermediate_size: int = layer.intermediate_size_per_partition
        self.activation: str = layer.activation.value

    def chosen(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """As ``Experts``: x [T, H] to [T, H]."""
        ops = torch.ops.rbln_emulator
        mixed: Tensor = ops.quantized_moe(x, weights, ids, *self._arguments())
        return mixed

    def weighted(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """As ``Experts``: x [T, H] to [T, H]."""
        ops = torch.ops.rbln_emulator
        mixed: Tensor = ops.quantized_moe_masked(x, weights, counts, *self._arguments())
        return mixed

    def expert(self, x: Tensor, number: int) -> Tensor:
        """As ``Experts``: x [T, H] to [T, H]."""
        gate_up = self._w13.product(x, number, 2 * self.intermediate_size)
        if self.adapters is not None:
            self.adapters.add_first(gate_up, x, number)
        if self.activation == "silu":
            inner = torch.ops.rbln_emulator.activate(gate_up, "silu", True)
        else:
            inner = swiglu_oai(gate_up)
        out = self._w2.product(inner, number, self.hidden_size)
        if self.adapters is not None:
            self.adapters.add_second(out, inner, number)
        return out

    def _arguments(self) -> tuple[Any, ...]:
        adapters = () if self.adapters is None else self.adapters.arguments()
        return *self._w13, *self._w2, self.intermediate_size, self.activation, *adapters


class RblnQuantizedMoEMethod(RblnMoEMethod):
    """Gated experts of any top-k routing over quantised weights; on an NPU e4m3 in blocks."""

    sdk_op = BLOCKS_OP

    def __init__(self, moe: FusedMoEConfig, w13: ExpertFormat, w2: ExpertFormat) -> None:
        super().__init__(moe)
        self._formats = {"w13": w13, "w2": w2}
        self._takes_bytes = isinstance(w13, ByteRows) and w13.stored.has_byte_inputs
        if self._takes_bytes:
            self.sdk_op = BYTES_OP

    def __str__(self) -> str:
        kinds = dict.fromkeys(str(written.quantized) for written in self._formats.values())
        return " and ".join(kinds) + " experts"

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
        self._check(layer, hidden_size, inner)
        for name, columns, depth, parts in (
            ("w13", 2 * inner, hidden_size, 2),
            ("w2", hidden_size, inner, 1),
        ):
            written = self._formats[name]
            is_transposed = written.is_transposed
            tensors = written.tensors(columns, depth, parts, params_dtype)
            tensors["bias"] = torch.empty(columns, dtype=params_dtype)
            for suffix, value in tensors.items():
                stacked = value.new_zeros(num_experts, *value.shape)
                parameter = nn.Parameter(stacked, requires_grad=False)
                layer.register_parameter(f"{name}_{suffix}", parameter)
                loader = {"is_transposed": is_transposed, "quant_method": written.scope_of(suffix)}
                set_weight_attrs(parameter, attributes | loader)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring words and scales into the kernels' layout, and drop the rest."""
        if not self.capabilities.packed_weights:
            self.keep_stored(layer)
            return
        for name, written in self._formats.items():
            self._keep_bias(layer, f"{name}_bias")
            prefix = f"{name}_"
            stored = {
                key.removeprefix(prefix): layer._parameters.pop(key).data
                for key in list(layer._parameters)
                if key.startswith(prefix) and key != f"{name}_bias"
            }
            for part, stack in zip(Packed._fields, _pack(stored, written), strict=True):
                if stack is not None:
                    parameter = nn.Parameter(stack, requires_grad=False)
                    layer.register_parameter(f"{name}_{part}", parameter)
        formats = [written.quantized.format for written in self._formats.values()]
        self.hold(layer, QuantizedExperts(layer, *formats))

    def keep_stored(self, layer: Any) -> None:
        """Hold experts of an NPU: e4m3 and scales as they are stored."""
        blocks = {}
        for name, written in self._formats.items():
            assert isinstance(written, ByteRows)
            self._keep_bias(layer, f"{name}_bias")
            scales = layer._parameters.pop(f"{name}_{written.stored.scale_name}").data
            layer.register_parameter(
                f"{name}_weight_scale", nn.Parameter(scales, requires_grad=False)
            )
            for dropped in written.stored.dropped:
                del layer._parameters[f"{name}_{dropped}"]
            blocks[name] = written.stored.block
        self.hold(layer, BlockExperts(layer, blocks["w13"], takes_bytes=self._takes_bytes))

    def packing_bytes(self, layer: Any) -> int:
        """Return the bytes that packing adds to the stored tensors of ``layer``."""
        del layer
        return 0

    def has_sdk_form(self, inner: int) -> bool:
        """Return True if the SDK's op takes experts of ``inner`` columns in the stored form."""
        del inner
        first, second = self._formats.values()
        if not isinstance(first, ByteRows) or first != second:
            return False
        return first.stored.is_float and first.stored.scope == "block"

    def _check(self, layer: Any, hidden_size: int, inner: int) -> None:
        units = [written.unit for written in self._formats.values()]
        is_known = self.capabilities.packed_weights or self.has_sdk_form(inner)
        if not is_known or any(size % unit for size in (hidden_size, inner) for unit in units):
            raise QUANTIZED_EXPERTS.refusal(
                f"{layer.layer_name}: {self}, sizes {hidden_size} and {inner}"
            )

    def _keep_bias(self, layer: Any, name: str) -> None:
        # Some checkpoints have biases that their architecture does not know of.
        if not (self.moe.has_bias or name in layer._loaded_expert_biases):
            layer.register_parameter(name, None)


def _pack(stored: dict[str, Tensor], written: ExpertFormat) -> Iterable[Tensor | None]:
    """The parts of ``Packed`` of all experts; one expert's is all that is made beside them."""
    count = len(next(iter(stored.values())))
    first = written.pack({suffix: stack[0] for suffix, stack in stored.items()})
    made: list[Tensor | None] = [
        None if part is None else part.new_empty(count, *part.shape) for part in first
    ]
    for number in range(count):
        of_one = {suffix: stack[number] for suffix, stack in stored.items()}
        packed = first if number == 0 else written.pack(of_one)
        for stack, part in zip(made, packed, strict=True):
            if stack is not None and part is not None:
                stack[number].copy_(part)
    return made
