"""The projection from a compressed head to keys and values, taken apart head by head.

A key of head h is ``K_h c`` of the compressed ``c`` and a value ``V_h c``. So a query against keys
is ``K_h^T q`` against what is cached, and a sum of values is ``V_h`` times a sum of what is cached:
keys and values of single tokens are never made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rbln_backend.devices.emulated.kernel_set import packs_weights
from rbln_backend.devices.emulated.packing import pack, packed_shape
from rbln_backend.vllm_compat.latent import QuantizeMethodBase, UnquantizedLinearMethod


class AbsorbedProjection(QuantizeMethodBase):
    """Takes the place of ``method`` of a linear layer [H * (key_size + value_size), C].

    The weight is loaded as ``method`` has it, and afterwards kept as two stacks alone: parameters
    ``to_latent`` and ``to_value`` of the layer.
    """

    def __init__(self, method: QuantizeMethodBase, key_size: int, value_size: int) -> None:
        self._method = method
        self.key_size, self.value_size = key_size, value_size

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """As the layer's own method."""
        self._method.create_weights(layer, *args, **kwargs)

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Not called: ``absorb`` [..., H, C] and ``values_of`` [..., H, V] are the products."""
        raise NotImplementedError("the projection is absorbed into queries and results")

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the weight by heads, in the layout of the active kernels."""
        self._method.process_weights_after_loading(layer)
        by_head = self._plain_weight(layer).unflatten(0, (-1, self.key_size + self.value_size))
        keys, values = by_head.split([self.key_size, self.value_size], dim=1)
        self.latent_size = by_head.shape[2]
        for name in list(layer._parameters):
            layer.register_parameter(name, None)
        for name, stack in (("to_latent", keys.transpose(1, 2)), ("to_value", values)):
            kept = nn.Parameter(_prepared(stack), requires_grad=False)
            layer.register_parameter(name, kept)

    def absorb(self, layer: Any, queries: Tensor) -> Tensor:
        """queries [..., H, key_size] to [..., H, C]."""
        return _multiply(queries, layer.to_latent, self.latent_size)

    def values_of(self, layer: Any, latents: Tensor) -> Tensor:
        """Sums of what is cached, [..., H, C], to [..., H, value_size]."""
        return _multiply(latents, layer.to_value, self.value_size)

    def _plain_weight(self, layer: Any) -> Tensor:
        """[H * (key_size + value_size), C] in the model's dtype, whatever holds it."""
        if isinstance(self._method, UnquantizedLinearMethod):
            weight: Tensor = layer.weight.data
            return weight
        unit = torch.eye(layer.input_size, dtype=layer.params_dtype)
        columns: Tensor = self._method.apply(layer, unit)
        return columns.t()


def _prepared(stack: Tensor) -> Tensor:
    """[H, N, K] as ``_multiply`` reads it, so that graphs compute nothing of weights alone."""
    if not packs_weights():
        # The axes of the vendor's weights: vllm-rbln 0.12, ``patches/mla.py``.
        return stack.transpose(1, 2).unsqueeze(0).contiguous()
    packed = stack.new_empty((stack.shape[0], *packed_shape(stack.dtype, *stack.shape[1:])))
    for target, matrix in zip(packed, stack, strict=True):
        target.copy_(pack(matrix))
    return packed


def _multiply(x: Tensor, stack: Tensor, width: int) -> Tensor:
    """x [..., H, K] by the matrix of each head; kernels take rows [T, H, K] alone.

    ``stack``: packed, or [1, H, K, width].
    """
    if packs_weights():
        product: Tensor = torch.ops.rbln_emulator.linear_heads(x, stack, width)
        return product
    product = torch.matmul(x.transpose(-3, -2), stack).transpose(-3, -2)
    return product if x.dim() > 3 else product.squeeze(0)
