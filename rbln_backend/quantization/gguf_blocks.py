"""Checkpoints that are made of GGUF files here, with blocks that stay packed where ops take them.

A weight [N, K] is stored as ``blocks4`` or ``blocks8``, words int32 [N, K * bits / 32] in the order
that ``emulator.quantized_packing.block_words`` gives them, ``scales`` [N, K / group] and, where its
form has them, ``minima`` of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rbln_backend.checkpoints.block_form import BlockForm
from rbln_backend.compiler.device import device_capabilities
from rbln_backend.emulator.quantized_packing import (
    block_numbers,
    expand_blocks,
    pack_scales,
    pack_words,
)
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.vllm_compat.quantization import (
    LinearBase,
    ParallelLMHead,
    QuantizeMethodBase,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    VocabParallelEmbedding,
    set_weight_attrs,
)
from rbln_backend.vllm_compat.surface import configured, get_current_vllm_config

_EMBEDDING = "model.embed_tokens"


class RblnBlockMethod(QuantizeMethodBase):
    """Multiplies by packed blocks, and looks rows up in them."""

    def __init__(self, form: BlockForm, layer_name: str) -> None:
        self._form, self._name = form, layer_name
        self.weights = str(form)

    def create_weights(self, *args: Any, **given: Any) -> None:
        """Parameters as vLLM's loader fills them; raises ``UnsupportedModelError``."""
        # Upstream's method declares no names, and an override takes what it declares.
        self._register(*args, **given)

    def _register(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., Any],
        **_: Any,
    ) -> None:
        del input_size, output_size
        form, depth, rows = self._form, input_size_per_partition, sum(output_partition_sizes)
        if depth % 32:
            raise UnsupportedModelError(
                f"{self._name}: {depth} inputs of a rank end within a block of 32; use another "
                "--tensor-parallel-size"
            )
        self._rows, self._dtype = rows, params_dtype
        shape = (rows, depth // form.group_size)
        parameters = {
            form.format: torch.empty(rows, depth * form.bits // 32, dtype=torch.int32),
            "scales": torch.empty(shape, dtype=getattr(torch, form.scales)),
        }
        if form.has_minima:
            parameters["minima"] = torch.empty_like(parameters["scales"])
        for name, data in parameters.items():
            parameter = nn.Parameter(data, requires_grad=False)
            attributes = {"input_dim": 1, "output_dim": 0, "weight_loader": weight_loader}
            set_weight_attrs(parameter, attributes)
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring words, scales and minima into the kernels' layout."""
        words = pack_words(getattr(layer, self._form.format).data)
        del layer._parameters[self._form.format]
        # vLLM's adapters look for a weight under one of the names that it knows.
        packed = {"qweight": words, "scales": pack_scales(layer.scales)}
        if self._form.has_minima:
            packed["minima"] = pack_scales(layer.minima)
        for name, value in packed.items():
            layer.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def apply(self, layer: Any, *args: Any, **given: Any) -> Tensor:
        """x [..., K] to [..., N] of its dtype, with a bias if one is given."""
        return self._multiply(layer, *args, **given)

    def embedding(self, layer: Any, *args: Any, **given: Any) -> Tensor:
        """Rows int64 [...] to [..., K] of the model's dtype."""
        return self._look_up(layer, *args, **given)

    def _multiply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = torch.ops.rbln_emulator.quantized_linear(
            x, *self._parts(layer), bias, self._rows, self._form.format
        )
        return out

    def _look_up(self, layer: Any, ids: Tensor) -> Tensor:
        rows: Tensor = torch.ops.rbln_emulator.block_rows(
            ids, *self._parts(layer), self._rows, self._form.format
        )
        return rows.to(self._dtype)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """The embedding is the head: a product with it is one with its packed rows."""
        del layer
        return embed_tokens

    def _parts(self, layer: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        return layer.qweight, layer.scales, layer.minima if self._form.has_minima else None


class RblnExpandedMethod(RblnBlockMethod):
    """Makes plain weights of blocks once they are loaded, where no op takes blocks."""

    def __init__(self, form: BlockForm, layer_name: str) -> None:
        super().__init__(form, layer_name)
        self.weights = f"{form}, expanded when loaded"

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave a layer as vLLM has it without a quantisation."""
        parts = layer._parameters
        words, scales = parts.pop(self._form.format), parts.pop("scales")
        minima = parts.pop("minima", None)
        numbers = block_numbers(words, self._form.bits)
        weight = expand_blocks(numbers, scales, minima, self._form.bits).to(self._dtype)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        is_table = isinstance(layer, VocabParallelEmbedding)
        layer.quant_method = (UnquantizedEmbeddingMethod if is_table else UnquantizedLinearMethod)()


def block_method(
    layers: Mapping[str, BlockForm],
    joined: Mapping[str, list[str]],
    layer: nn.Module,
    prefix: str,
) -> QuantizeMethodBase | None:
    """Return the method that multiplies by ``layer``'s weights; None for unquantized layers.

    ``layers`` are by the checkpoint's names, ``joined`` has those that vLLM makes one.
    """
    is_table = isinstance(layer, VocabParallelEmbedding)
    if not (is_table or isinstance(layer, LinearBase)):
        return None
    # vLLM's embeddings do not all know their name.
    name = _EMBEDDING if is_table and not isinstance(layer, ParallelLMHead) else prefix
    stem, dot, last = name.rpartition(".")
    form = layers.get(stem + dot + joined.get(last, [last])[0])
    if form is not None:
        keeps_blocks = device_capabilities(configured(get_current_vllm_config())).packed_weights
        return (RblnBlockMethod if keeps_blocks else RblnExpandedMethod)(form, name)
    return None if is_table else UnquantizedLinearMethod()
