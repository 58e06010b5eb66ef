"""The part of an adapter's matrices that one rank needs, and their sizes over all ranks.

Adapters are split as the layers that they change: B by outputs where the layer's outputs are, A by
inputs where its inputs are. Replicated key heads are in the part of each rank that has them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rbln_backend.vllm_compat.lora import (
    BaseLinearLayerWithLoRA,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
)

Matrices = list[Tensor | None]


class WholeLayer(NamedTuple):
    """A layer's sizes over all tensor-parallel ranks, its outputs by slice."""

    inputs: int
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, layer: BaseLinearLayerWithLoRA) -> WholeLayer:
        """Return the sizes of the layer that ``layer`` adapts."""
        outputs = _outputs(layer.base_layer)
        return cls(layer.base_layer.input_size, outputs if layer.n_slices > 1 else (sum(outputs),))


def _outputs(layer: LinearBase) -> tuple[int, ...]:
    if isinstance(layer, QKVParallelLinear):
        # Its own list counts a key head once for every rank that has it.
        keys = layer.total_num_kv_heads
        return (
            layer.total_num_heads * layer.head_size,
            keys * layer.head_size,
            keys * layer.v_head_size,
        )
    if isinstance(layer, MergedColumnParallelLinear):
        return tuple(layer.output_sizes)
    return (layer.output_size,)


def share(layer: BaseLinearLayerWithLoRA, a: Matrices, b: Matrices) -> tuple[Matrices, Matrices]:
    """Return this rank's part of [r, inputs] and [outputs, r], per slice of ``layer``."""
    if layer.n_slices > 1:
        return layer.slice_lora_a(a), layer.slice_lora_b(b)
    (lower,), (upper,) = a, b
    assert lower is not None
    assert upper is not None
    return [layer.slice_lora_a(lower)], [layer.slice_lora_b(upper)]
