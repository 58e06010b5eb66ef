"""Linear layers whose checkpoint has a byte for each weight: FP8, and integers of 8 bits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rbln_backend.devices.emulated.packing import pack_bytes, pack_scales, pack_words
from rbln_backend.devices.port import device_capabilities
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.quantization.schemes import BLOCK_DEPTH
from rbln_backend.quantization.sdk.forms import (
    by_groups_of_bytes,
    dequantized_blocks,
    dequantized_parts,
)
from rbln_backend.quantization.weights import CHANNEL, Weights
from rbln_backend.unsupported import QUANTIZATION_ON_NPU
from rbln_backend.vllm_compat.quantization import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    CompressedTensorsScheme,
    ModelWeightParameter,
    PerTensorScaleParameter,
    validate_fp8_block_shape,
)
from rbln_backend.vllm_compat.surface import configured, get_current_vllm_config

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
        """No GPU has to have anything."""
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
        del params_dtype
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
            scales, words = self._unpacked_scales(loaded), layer.weight.data
        for name in (stored.scale_name, *stored.dropped):
            del layer._parameters[name]
        for name, value in (("weight", words), ("weight_scale", scales)):
            layer.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., K] to [..., N] of its dtype."""
        if not self._keeps_words:
            if self._stored.has_byte_inputs:
                x = by_groups_of_bytes(x, self._stored.block[1])
            return torch.nn.functional.linear(x, self._dequantized(layer, x.dtype), bias)
        out: Tensor = torch.ops.rbln_emulator.quantized_linear(
            *(x, layer.weight, layer.weight_scale, None, bias),
            *(sum(self._columns), self.weights.format),
        )
        return out

    def _unpacked_scales(self, loaded: Tensor) -> Tensor:
        """As the graph of an NPU holds them: of blocks, or of parts, one where all are equal."""
        if self._stored.scope == "block":
            return loaded
        scales = self._stored.scales_by_part(loaded, len(self._columns))
        return scales[0].clone() if bool((scales == scales[0]).all()) else scales

    def _dequantized(self, layer: Any, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K] of a graph for an NPU."""
        if self._stored.scope == "block":
            return dequantized_blocks(layer.weight, layer.weight_scale, self._stored.block, dtype)
        return dequantized_parts(layer.weight, layer.weight_scale, self._columns, dtype)

    def _check(self, layer: Any, input_size: int, output_size: int) -> None:
        obstacle = self._obstacle()
        if obstacle is None and self._stored.scope == "block":
            sizes = (input_size, output_size, self._depth, self._columns)
            try:
                validate_fp8_block_shape(layer, *sizes, list(self._stored.block))
            except ValueError as error:
                obstacle = str(error)
        if obstacle is not None:
            raise UnsupportedModelError(
                f"{self._name}: {obstacle}; use another --tensor-parallel-size, or serve a "
                "bfloat16 copy of the checkpoint"
            )

    def _obstacle(self) -> str | None:
        if self._keeps_words:
            return self._stored.obstacle(self._depth)
        inputs = self._stored.block[1]
        ends_within = self._stored.scope == "block" and self._depth % inputs
        return f"{self._depth} inputs end within a block of {inputs}" if ends_within else None

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
