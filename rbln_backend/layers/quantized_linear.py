"""Linear layers over integers of 4 and 8 bits and over FP8.

The emulated device multiplies by packed words. The SDK has no op for a quantised linear layer: the
vendor's vllm-rbln 0.12 writes plain operators before ``linear``, which its compiler matches, and
which is said to keep the weights as they are stored.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
)
from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from rbln_backend.devices.emulated.packing import (
    pack_bytes,
    pack_scales,
    pack_transposed_words,
    pack_words,
    unpack_fields,
    unpack_numbers,
)
from rbln_backend.devices.port import device_capabilities
from rbln_backend.devices.rebel.environment import announce_quant_bits
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.layers.schemes import BLOCK_DEPTH, CHANNEL, Weights
from rbln_backend.limits import QUANTIZATION_ON_NPU
from rbln_backend.settings import configured

# The columns of an integer weight that the SDK finds a scale for; larger groups repeat theirs.
SDK_GROUP = 64
_E4M3 = torch.finfo(torch.float8_e4m3fn)
_SMALLEST = 1e-10


def dequantized_integers(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 [N, K] times scales [N, K / 64, 1] or [N, 1], in ``dtype``."""
    weight = values.to(dtype)
    if scales.dim() == 2:
        return weight * scales
    return (weight.view(weight.shape[0], -1, SDK_GROUP) * scales).view(weight.shape)


def dequantized_parts(
    values: Tensor, scales: Tensor, columns: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """e4m3 [N, K] times scales [parts], one for each of the parts of ``columns``, or [] for all.

    As vllm-rbln 0.12 writes ModelOpt's weights.
    """
    weight = values.to(dtype)
    if scales.dim() == 0:
        return weight * scales.to(dtype)
    parts = zip(weight.split(list(columns), dim=0), scales.to(dtype), strict=True)
    return torch.cat([part * scale for part, scale in parts], dim=0)


def dequantized_blocks(
    values: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """e4m3 [N, K] times scales [ceil(N / rows), K / inputs], one per ``block`` (rows, inputs)."""
    rows, inputs = block
    columns, depth = values.shape
    by_row = scales.repeat_interleave(rows, dim=0)[:columns, :]
    weight = values.view(columns, depth // inputs, inputs).to(dtype)
    return (weight * by_row[:, :, None].to(dtype)).view(columns, depth)


def scaled_in_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [T, K] as float32 in the range of e4m3, not rounded, and float32 scales [T, K / group]."""
    parts = x.unflatten(-1, (-1, group)).float()
    scales = parts.abs().amax(dim=-1, keepdim=True).clamp_min(_SMALLEST) / _E4M3.max
    values = (parts / scales).clamp(_E4M3.min, _E4M3.max)
    return values.flatten(-2), scales.squeeze(-1)


def by_groups_of_bytes(x: Tensor, group: int) -> Tensor:
    """x [T, K] as it is after ``scaled_in_groups``, in its dtype: the W8A8 form of an input.

    vllm-rbln 0.12 does not round to e4m3 in the graph either.
    """
    values, scales = scaled_in_groups(x, group)
    return values.to(x.dtype) * scales.repeat_interleave(group, dim=-1).to(x.dtype)


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
        self.weights = _get_weights(c)
        rbln = configured(get_current_vllm_config())
        self._keeps_words = device_capabilities(rbln).packed_weights
        if not (self._keeps_words or self.weights.symmetric):
            raise QUANTIZATION_ON_NPU.refusal(str(self.weights))

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Return True if the layer is supported, else False and the documented reason."""
        weights = _get_weights(c)
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
        words, scales, zeros = self._get_weight_params(layer)
        # compressed-tensors has [N, K / fields] and [N, groups], GPTQ both transposed.
        has_rows = getattr(words, "packed_dim", 1) == 1
        by_row = scales.data if has_rows else scales.data.t()
        if self._keeps_words:
            packed = pack_words(words.data) if has_rows else pack_transposed_words(words.data)
            kept = packed, pack_scales(by_row)
            if not self.weights.symmetric:
                assert zeros is not None, "vLLM makes them for weights that are not symmetric"
                # uint8 [groups, N], or words int32 [N / fields, groups] of neighbours along N.
                points = zeros.data
                if points.dtype == torch.int32:
                    by_group = unpack_numbers(points.t().contiguous(), self.weights.bits)
                    points = by_group.to(torch.uint8)
                panels = pack_transposed_words(points)
                layer.register_parameter("zeros", nn.Parameter(panels, requires_grad=False))
        else:
            rows = words.data if has_rows else words.data.t().contiguous()
            announce_quant_bits(self.weights.bits)
            by_row = by_row.contiguous()
            if self.weights.group_size != CHANNEL:
                # The SDK wants [N, K / 64, 1].
                repeats = self.weights.group_size // SDK_GROUP
                by_row = by_row.repeat_interleave(repeats, dim=1).unsqueeze(-1)
            kept = unpack_fields(rows, self.weights.bits), by_row
        for name, value in zip((self.w_q_name, self.w_s_name), kept, strict=True):
            layer.register_parameter(name, nn.Parameter(value, requires_grad=False))
        # Symmetric weights have no zero points, whatever a GPTQ checkpoint says in their place.
        for name in (self.w_zp_name or "", "weight_shape"):
            layer._parameters.pop(name, None)

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


def _get_weights(c: MPLinearLayerConfig) -> Weights:
    """vLLM's description in our words; types with an offset have no zero points."""
    return Weights(
        bits=c.weight_type.size_bits,
        group_size=CHANNEL if c.group_size == c.full_weight_shape[0] else c.group_size,
        symmetric=not c.zero_points and c.weight_type.has_bias(),
        kind="int" if c.weight_type.is_integer() else "float",
    )


logger = logging.getLogger(__name__)

# A number's highest bit: integers are stored without an offset, and multiplied with one of 2^7.
_SIGNS = -0x7F7F7F80


@dataclass(frozen=True, kw_only=True)
class ByteWeights:
    """Stored form of a weight [N, K] in a checkpoint."""

    is_float: bool
    """float8_e4m3fn, else int8."""
    scope: Literal["tensor", "channel", "block"]
    block: tuple[int, int] = (1, 0)
    """Rows and inputs that share a scale, where ``scope`` says block."""
    scale_name: str = "weight_scale"
    dropped: tuple[str, ...] = ()
    """Scalars for activations, which are not quantised."""
    published: str = ""
    has_byte_inputs: bool = False
    """True if inputs are e4m3, too (W8A8)."""

    def switched(self) -> ByteWeights:
        """Return the form that ``use_w8a8`` gives it on the device of the configuration."""
        rbln = configured(get_current_vllm_config())
        is_on = rbln.use_w8a8 and not device_capabilities(rbln).packed_weights
        if not (is_on and self.is_float and self.scope == "block"):
            return self
        return replace(self, has_byte_inputs=True, published="")

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored weight."""
        return torch.float8_e4m3fn if self.is_float else torch.int8

    def weights(self, depth: int) -> Weights:
        """Of a layer with ``depth`` inputs."""
        return Weights(
            bits=8,
            group_size=self._group(depth) if self.scope == "block" else CHANNEL,
            kind="float" if self.is_float else "int",
            input_bits=8 if self.has_byte_inputs else 16,
            published=self.published,
        )

    def tell(self) -> None:
        """Log, once for a process, what a checkpoint asks for and does not get."""
        if self.published:
            _tell(self.published)

    def obstacle(self, depth: int) -> str | None:
        """Why ``depth`` inputs cannot be; None: they can."""
        if depth % 4:
            return f"{depth} inputs do not fill words of 4"
        if self.scope == "block" and self._group(depth) % BLOCK_DEPTH:
            return f"{depth} inputs end within a chunk of {BLOCK_DEPTH}"
        return None

    def pack_words(self, weight: Tensor) -> Tensor:
        """``weight`` [N, K] as panels, in its own memory where it fits; not to be read again."""
        if self.is_float:
            return pack_bytes(weight)
        return pack_words(weight.view(torch.int32).bitwise_xor_(_SIGNS))

    def scales_by_part(self, scales: Tensor, parts: int) -> Tensor:
        """Scales [1] or [parts] of a layer's tensors, some NaN, to [parts]."""
        filled = scales.float().reshape(-1).expand(parts)
        return filled.where(~filled.isnan(), filled[0])

    def pack_scales(self, scales: Tensor, columns: Sequence[int], depth: int) -> Tensor:
        """One per part of ``columns``, [N, 1] or by block, as float32 panels."""
        spread = scales.float()
        if self.scope == "tensor":
            # A layer that is one in the checkpoint, but several in vLLM, has but the first scale.
            filled = self.scales_by_part(spread, len(columns))
            spread = filled.repeat_interleave(torch.tensor(columns)).unsqueeze(1)
        elif self.scope == "block":
            rows, inputs = self.block
            group = self._group(depth)
            spread = spread.repeat_interleave(rows, 0)[: sum(columns)]
            spread = spread.repeat_interleave(inputs // group, 1)[:, : depth // group]
        return pack_scales(spread)

    def _group(self, depth: int) -> int:
        """Where the last block is cut, its scale and all others' are repeated for less."""
        return math.gcd(self.block[1], depth)


@cache
def _tell(published: str) -> None:
    logger.warning(
        "the checkpoint is published as %s: its weights are used, activations are not quantised",
        published,
    )


class RblnByteScheme(CompressedTensorsScheme):
    """Multiplies activations of the model's dtype; those of any other checkpoint's, too."""

    def __init__(self, stored: ByteWeights, layer_name: str) -> None:
        stored = stored.switched()
        self._stored, self._name = stored, layer_name
        stored.tell()
        self.weights = stored.weights(stored.block[1])
        rbln = configured(get_current_vllm_config())
        self._keeps_words = device_capabilities(rbln).packed_weights
        if not self._keeps_words and (not stored.is_float or stored.scope == "channel"):
            raise QUANTIZATION_ON_NPU.refusal(f"{layer_name}: {self.weights}")

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    def create_weights(self, *args: Any, **given: Any) -> None:
        """Parameters as vLLM's loader fills them; raises ``UnsupportedModelError``."""
        # Upstream's scheme declares no names, and an override takes what it declares.
        self._register(*args, **given)

    def _register(
        self,
        layer: Any,
        input_size: int,
        output_size: int,
        output_partition_sizes: list[int],
        input_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., Any],
        **_: Any,
    ) -> None:
        stored, depth, columns = self._stored, input_size_per_partition, output_partition_sizes
        self._columns, self._depth = columns, depth
        self._check(layer, input_size, output_size)
        self.weights = stored.weights(depth)
        # vLLM's loader finds by it which blocks a part of a merged layer has.
        layer.weight_block_size = stored.block if stored.scope == "block" else None
        weight = torch.empty(sum(columns), depth, dtype=stored.dtype)
        layer.register_parameter(
            "weight",
            ModelWeightParameter(
                data=weight, input_dim=1, output_dim=0, weight_loader=weight_loader
            ),
        )
        layer.register_parameter(stored.scale_name, self._scales(weight_loader))
        for name in stored.dropped:
            scalar = torch.zeros(len(columns), dtype=torch.float32)
            layer.register_parameter(
                name, PerTensorScaleParameter(data=scalar, weight_loader=weight_loader)
            )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring words and scales into the kernels' layout, and drop the rest."""
        stored = self._stored
        loaded = getattr(layer, stored.scale_name).data
        if loaded[0].isnan().any():
            raise UnsupportedModelError(
                f"{self._name}: the checkpoint has no {stored.scale_name} for it; if its weight is "
                "not quantised, quantization_config has to name it among those left alone"
            )
        if self._keeps_words:
            scales = stored.pack_scales(loaded, self._columns, self._depth)
            words = stored.pack_words(layer.weight.data)
        else:
            # As the graph of an NPU holds them: of blocks, or of parts, one where all are equal.
            scales, words = loaded, layer.weight.data
            if stored.scope != "block":
                scales = stored.scales_by_part(loaded, len(self._columns))
                scales = scales[0].clone() if bool((scales == scales[0]).all()) else scales
        for name in (stored.scale_name, *stored.dropped):
            del layer._parameters[name]
        for name, value in (("weight", words), ("weight_scale", scales)):
            layer.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., K] to [..., N] of its dtype."""
        if not self._keeps_words:
            stored, words, scales = self._stored, layer.weight, layer.weight_scale
            if stored.has_byte_inputs:
                x = by_groups_of_bytes(x, stored.block[1])
            if stored.scope == "block":
                weight = dequantized_blocks(words, scales, stored.block, x.dtype)
            else:
                weight = dequantized_parts(words, scales, self._columns, x.dtype)
            return torch.nn.functional.linear(x, weight, bias)
        out: Tensor = torch.ops.rbln_emulator.quantized_linear(
            x,
            layer.weight,
            layer.weight_scale,
            None,
            bias,
            sum(self._columns),
            self.weights.format,
        )
        return out

    def _check(self, layer: Any, input_size: int, output_size: int) -> None:
        stored, depth, obstacle = self._stored, self._depth, None
        if self._keeps_words:
            obstacle = stored.obstacle(depth)
        elif stored.scope == "block" and depth % stored.block[1]:
            obstacle = f"{depth} inputs end within a block of {stored.block[1]}"
        if obstacle is None and stored.scope == "block":
            sizes = (input_size, output_size, depth, self._columns)
            try:
                validate_fp8_block_shape(layer, *sizes, list(stored.block))
            except ValueError as error:
                obstacle = str(error)
        if obstacle is not None:
            raise UnsupportedModelError(
                f"{self._name}: {obstacle}; use another --tensor-parallel-size, or serve a "
                "bfloat16 copy of the checkpoint"
            )

    def _scales(self, weight_loader: Callable[..., Any]) -> BasevLLMParameter:
        """NaN, until a tensor fills it."""
        scope, columns, depth = self._stored.scope, self._columns, self._depth
        if scope == "tensor":
            of_part = torch.full((len(columns),), math.nan)
            return PerTensorScaleParameter(data=of_part, weight_loader=weight_loader)
        if scope == "channel":
            of_row = torch.full((sum(columns), 1), math.nan)
            return ChannelQuantScaleParameter(
                data=of_row, output_dim=0, weight_loader=weight_loader
            )
        rows, inputs = self._stored.block
        by_block = torch.full((-(-sum(columns) // rows), -(-depth // inputs)), math.nan)
        return BlockQuantScaleParameter(
            data=by_block, input_dim=1, output_dim=0, weight_loader=weight_loader
        )
