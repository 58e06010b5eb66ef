"""Quantised experts: their parameters while loading, their packing, and what is kept.

vLLM's loader stacks the tensors of all experts, gate and up projections in one, behind "w13_" and
"w2_". AWQ's words hold eight outputs of one input, even ones before odd ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.utils import set_weight_attrs

from rbln_backend.devices.emulated.packing import (
    pack_scales,
    pack_transposed_words,
    pack_words,
    unpack_numbers,
)
from rbln_backend.layers.experts import ExpertAdapters, PlainExperts, WeightStack, swiglu_oai
from rbln_backend.layers.moe import RblnMoEMethod
from rbln_backend.layers.quantized_linear import ByteWeights, dequantized_blocks, scaled_in_groups
from rbln_backend.layers.schemes import CHANNEL, Weights
from rbln_backend.limits import QUANTIZED_EXPERTS

# The place of each of eight neighbouring outputs in its word, counted from the lowest bits; as
# AutoAWQ's kernels of the version "gemm" read them.
_PLACES = torch.tensor((0, 4, 1, 5, 2, 6, 3, 7), dtype=torch.int32) * 4


def words_along_inputs(words: Tensor) -> Tensor:
    """Words int32 [K, N / 8] as [K / 8, N], each of eight neighbouring inputs, first lowest."""
    found = words.new_zeros(words.shape[0] // 8, words.shape[1] * 8)
    for place in range(8):
        found |= _numbers(words[place::8]) << (4 * place)
    return found


def zero_points(words: Tensor) -> Tensor:
    """Words int32 [groups, N / 8] as uint8 [groups, N]."""
    return _numbers(words).to(torch.uint8)


def _numbers(words: Tensor) -> Tensor:
    return ((words.unsqueeze(-1) >> _PLACES) & 15).flatten(-2)


Tensors = dict[str, Tensor]


class Packed(NamedTuple):
    """A matrix as the kernels read it: see ``devices.emulated.packing``."""

    words: Tensor
    scales: Tensor
    zeros: Tensor | None = None


@dataclass(frozen=True)
class ExpertFormat(ABC):
    """One way to store matrices."""

    quantized: Weights
    is_transposed: ClassVar[bool] = False
    """True if tensors have inputs before outputs."""

    @property
    def scope(self) -> str:
        """The scope of a scale, by the name that vLLM's loader uses."""
        return "channel" if self.quantized.group_size == CHANNEL else "group"

    def get_scope(self, suffix: str) -> str:
        """Return the scope of the stored tensor ``suffix``: ``scope``, of all by default."""
        return self.scope

    @property
    def unit(self) -> int:
        """Number that divides both sizes of a rank's matrix."""
        group = self.quantized.group_size
        return self.fields if group == CHANNEL else group

    @property
    def fields(self) -> int:
        """Weights in a word."""
        return 32 // self.quantized.bits

    def groups(self, depth: int) -> int:
        """Scales of a column."""
        group = self.quantized.group_size
        return 1 if group == CHANNEL else depth // group

    @abstractmethod
    def tensors(self, columns: int, depth: int, parts: int, dtype: torch.dtype) -> Tensors:
        """Return empty stored tensors by suffix, for ``parts`` matrices [columns, depth] in all."""

    @abstractmethod
    def pack(self, stored: Mapping[str, Tensor]) -> Packed:
        """Return one matrix [N, K] in the kernels' layout; may reuse the memory of ``stored``."""


class PackedRows(ExpertFormat):
    """compressed-tensors pack-quantized: words [N, K / fields], scales [N, groups]."""

    def tensors(self, columns: int, depth: int, parts: int, dtype: torch.dtype) -> Tensors:
        groups = self.groups(depth)
        made = {
            "weight_packed": torch.empty(columns, depth // self.fields, dtype=torch.int32),
            "weight_scale": torch.empty(columns, groups, dtype=dtype),
            "weight_shape": torch.empty(2, dtype=torch.int32),
        }
        if not self.quantized.symmetric:
            zeros = torch.empty(columns // self.fields, groups, dtype=torch.int32)
            made["weight_zero_point"] = zeros
        return made

    def pack(self, stored: Mapping[str, Tensor]) -> Packed:
        words, scales = pack_words(stored["weight_packed"]), pack_scales(stored["weight_scale"])
        if self.quantized.symmetric:
            return Packed(words, scales)
        by_group = stored["weight_zero_point"].t().contiguous()
        zeros = unpack_numbers(by_group, self.quantized.bits).to(torch.uint8)
        return Packed(words, scales, pack_transposed_words(zeros))


class GptqColumns(ExpertFormat):
    """GPTQ: words [K / fields, N], scales [groups, N]; zero points and order say nothing."""

    is_transposed = True

    def tensors(self, columns: int, depth: int, parts: int, dtype: torch.dtype) -> Tensors:
        groups = self.groups(depth)
        return {
            "qweight": torch.empty(depth // self.fields, columns, dtype=torch.int32),
            "scales": torch.empty(groups, columns, dtype=dtype),
            "qzeros": torch.empty(groups, columns // self.fields, dtype=torch.int32),
        }

    def pack(self, stored: Mapping[str, Tensor]) -> Packed:
        words, scales = stored["qweight"], stored["scales"]
        return Packed(pack_transposed_words(words), pack_transposed_words(scales))


class AwqColumns(ExpertFormat):
    """AWQ: words [K, N / 8] in its own order, scales [groups, N], zero points [groups, N / 8]."""

    is_transposed = True

    def tensors(self, columns: int, depth: int, parts: int, dtype: torch.dtype) -> Tensors:
        groups = self.groups(depth)
        return {
            "qweight": torch.empty(depth, columns // 8, dtype=torch.int32),
            "scales": torch.empty(groups, columns, dtype=dtype),
            "qzeros": torch.empty(groups, columns // 8, dtype=torch.int32),
        }

    def pack(self, stored: Mapping[str, Tensor]) -> Packed:
        words = pack_transposed_words(words_along_inputs(stored["qweight"]))
        zeros = pack_transposed_words(zero_points(stored["qzeros"]))
        return Packed(words, pack_transposed_words(stored["scales"]), zeros)


@dataclass(frozen=True)
class ByteRows(ExpertFormat):
    """FP8, or integers of 8 bits, a byte each."""

    stored: ByteWeights

    @classmethod
    def of(cls, stored: ByteWeights) -> ByteRows:
        """Rows of what a checkpoint has."""
        stored = stored.switched()
        stored.tell()
        return cls(stored.weights(stored.block[1]), stored)

    @property
    def scope(self) -> str:
        return self.stored.scope

    @property
    def unit(self) -> int:
        return lcm(*self.stored.block) if self.stored.scope == "block" else self.fields

    def tensors(self, columns: int, depth: int, parts: int, dtype: torch.dtype) -> Tensors:
        rows, inputs = self.stored.block
        scales: dict[str, tuple[int, ...]] = {
            "tensor": (parts,) if parts > 1 else (),
            "channel": (columns, 1),
            "block": (columns // rows, depth // max(inputs, 1)),
        }
        return {
            "weight": torch.empty(columns, depth, dtype=self.stored.dtype),
            # The default dtype is the model's while it is made.
            self.stored.scale_name: torch.empty(scales[self.stored.scope], dtype=torch.float32),
            **{name: torch.empty(()) for name in self.stored.dropped},
        }

    def pack(self, stored: Mapping[str, Tensor]) -> Packed:
        weight, scales = stored["weight"], stored[self.stored.scale_name]
        columns, depth = weight.shape
        parts = scales.numel() if self.stored.scope == "tensor" else 1
        packed = self.stored.pack_scales(scales, [columns // parts] * parts, depth)
        return Packed(self.stored.pack_words(weight), packed)


class Mxfp4Rows(ExpertFormat):
    """gpt-oss as published: two fields a byte [N, K / 2], exponents uint8 [N, K / 32]."""

    @property
    def scope(self) -> str:
        return "block"

    def tensors(self, columns: int, depth: int, parts: int, dtype: torch.dtype) -> Tensors:
        return {
            "weight": torch.empty(columns, depth // 2, dtype=torch.uint8),
            "weight_scale": torch.empty(columns, self.groups(depth), dtype=torch.uint8),
        }

    def pack(self, stored: Mapping[str, Tensor]) -> Packed:
        words = pack_words(stored["weight"].view(torch.int32))
        return Packed(words, pack_scales(stored["weight_scale"]))


class Nvfp4Rows(ExpertFormat):
    """NVFP4 of ModelOpt: two e2m1 a byte [N, K / 2], scales e4m3 [N, groups], one more float32.

    The emulated device has no kernel for such scales: twice an e2m1 is an integer, kept in a byte,
    with one float32 scale for a group, of the same value (1.25 bytes a weight in groups of 16).
    """

    _OF_WHOLE: ClassVar = ("weight_scale_2", "input_scale")

    @property
    def scope(self) -> str:
        return "block"

    def get_scope(self, suffix: str) -> str:
        """As ``ExpertFormat``; the second scales belong to whole matrices."""
        return "tensor" if suffix in self._OF_WHOLE else self.scope

    def tensors(self, columns: int, depth: int, parts: int, dtype: torch.dtype) -> Tensors:
        whole = (parts,) if parts > 1 else ()
        return {
            "weight": torch.empty(columns, depth // 2, dtype=torch.uint8),
            "weight_scale": torch.empty(columns, self.groups(depth), dtype=torch.float8_e4m3fn),
            **{name: torch.empty(whole, dtype=torch.float32) for name in self._OF_WHOLE},
        }

    def pack(self, stored: Mapping[str, Tensor]) -> Packed:
        halves = torch.stack((stored["weight"] & 15, stored["weight"] >> 4), dim=-1)
        twice = _TWICE_E2M1[halves.flatten(-2).long()]
        seconds = stored["weight_scale_2"].reshape(-1, 1) / 2
        rows = stored["weight_scale"].float()
        scales = rows * seconds.repeat_interleave(len(rows) // len(seconds), 0)
        return Packed(pack_words(twice.view(torch.int32)), pack_scales(scales))


_SIZES = (0, 1, 2, 3, 4, 6, 8, 12)
_TWICE_E2M1 = torch.tensor((*_SIZES, *(-size for size in _SIZES)), dtype=torch.int8)


BLOCKS_OP, BYTES_OP = "custom_moe_glu_group_dequantize", "custom_moe_glu_w8a8"


class BlockExperts(PlainExperts):
    """w13 [E, 2 * I, H] and w2 [E, H, I] of e4m3, float32 scales [E, rows, inputs] by block."""

    def __init__(self, layer: Any, block: tuple[int, int], *, takes_bytes: bool) -> None:
        """``block``: rows and inputs that share a scale; both divide a rank's sizes."""
        super().__init__(layer)
        self._block, self._takes_bytes = block, takes_bytes
        self._w13_scale, self._w2_scale = layer.w13_weight_scale, layer.w2_weight_scale

    def glu(self, x: Tensor, by_expert: Tensor, expert_map: Tensor | None) -> Tensor:
        inner = self.intermediate_size
        rows, ops = inner // self._block[0], torch.ops.rbln_custom_ops
        weights = (
            self.w13[:, :inner],
            self._w13_scale[:, :rows],
            self.w13[:, inner:],
            self._w13_scale[:, rows:],
            self.w2,
            self._w2_scale,
            by_expert,
            torch.tensor(self._block[1], dtype=torch.int32),
            self.activation,
        )
        rest = (*self._split_biases(), expert_map)
        mixed: Tensor
        if self._takes_bytes:
            values, scales = scaled_in_groups(x, self._block[1])
            rounded = values.to(torch.float8_e4m3fn)
            mixed = ops.custom_moe_glu_w8a8(rounded, scales, *weights, x.dtype, *rest)
        else:
            mixed = ops.custom_moe_glu_group_dequantize(x, *weights, *rest)
        return mixed

    def _linear(self, x: Tensor, stack: WeightStack, number: int) -> Tensor:
        weight, bias = stack.row(number)
        scales = self._w13_scale if stack.weight is self.w13 else self._w2_scale
        plain = dequantized_blocks(weight, scales[number], self._block, x.dtype)
        return functional.linear(x, plain, bias)


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
        ops = torch.ops.rbln_emulator
        mixed: Tensor = ops.quantized_moe(x, weights, ids, *self._arguments())
        return mixed

    def weighted(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        ops = torch.ops.rbln_emulator
        mixed: Tensor = ops.quantized_moe_masked(x, weights, counts, *self._arguments())
        return mixed

    def expert(self, x: Tensor, number: int) -> Tensor:
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
                loader = {"is_transposed": is_transposed, "quant_method": written.get_scope(suffix)}
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
        return 0

    def has_sdk_form(self, inner: int) -> bool:
        """Return True if the SDK's op takes experts of ``inner`` columns in the stored form."""
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
