"""vLLM's mixture-of-experts layers as operators of the captured graph.

vLLM hides a layer's experts behind an op that looks the layer up by name while it runs, and leaves
the kernel to out-of-tree platforms. Here the layer is traced like any other, and its experts become
two ops: ``moe_route`` chooses, ``moe`` computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rbln_backend.emulator.build import packs_weights
from rbln_backend.emulator.fallback_moe import ACTIVATIONS
from rbln_backend.emulator.packing import packed_shape
from rbln_backend.unsupported import EXPERT_ACTIVATION, EXPERT_ROUTING, Feature
from rbln_backend.vllm_compat.surface import MoERunner, RoutedExperts, UnquantizedFusedMoEMethod


class EmulatedMoERunner(MoERunner):
    """A mixture-of-experts layer that Dynamo sees through."""

    def _select_forward(self) -> Callable[..., Any]:
        return self._forward_traced

    def _encode_layer_name(self) -> str:
        return str(self.layer_name)

    def _forward_traced(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        shared_experts_input: Tensor | None,
        input_ids: Tensor | None,
        *_: object,
    ) -> Any:
        """What upstream's op does once it has found the layer."""
        return self._forward_impl(hidden_states, router_logits, shared_experts_input, input_ids)


class EmulatedMoEMethod(UnquantizedFusedMoEMethod):
    """Top-k softmax routing and gated experts, with or without biases."""

    @property
    def is_monolithic(self) -> bool:
        """Routing belongs to the method: vLLM's own routers call kernels that are not here."""
        return True

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """As upstream; raises ``UnsupportedModelError`` where the ops cannot do what is asked."""
        missing = _missing_feature(layer)
        if missing is not None:
            raise missing.refusal(layer.layer_name)
        super().create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Give the experts' matrices the layout of the kernels, one layer at a time."""
        super().process_weights_after_loading(layer)
        # The runner would otherwise make it while it is traced.
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        if not packs_weights():
            return
        for name in ("w13_weight", "w2_weight"):
            packed = _pack(getattr(layer, name).data)
            layer.register_parameter(name, nn.Parameter(packed, requires_grad=False))

    def apply_monolithic(
        self,
        layer: RoutedExperts,
        x: Tensor,
        router_logits: Tensor,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """x [T, H], router_logits [T, E]; returns [T, H]."""
        weights, ids = torch.ops.rbln_emulator.moe_route(
            router_logits, layer.top_k, layer.renormalize
        )
        mixed: Tensor = torch.ops.rbln_emulator.moe(
            *(x, weights, ids),
            *(layer.w13_weight, getattr(layer, "w13_bias", None)),
            *(layer.w2_weight, getattr(layer, "w2_bias", None)),
            layer.intermediate_size_per_partition,
            layer.activation.value,
        )
        return mixed


def _pack(matrices: Tensor) -> Tensor:
    """Plain [E, N, K] to E packed matrices."""
    packed = matrices.new_empty(
        (matrices.shape[0], *packed_shape(matrices.dtype, *matrices.shape[1:]))
    )
    for target, matrix in zip(packed, matrices, strict=True):
        target.copy_(torch.ops.rbln_emulator.pack_linear_weight(matrix))
    return packed


def _missing_feature(layer: RoutedExperts) -> Feature | None:
    """The first thing that this layer needs and the ops lack, or None."""
    if layer.activation.value not in ACTIVATIONS or layer.swiglu_limit is not None:
        return EXPERT_ACTIVATION
    is_plain = (
        layer.scoring_func == "softmax"
        and not layer.use_grouped_topk
        and layer.custom_routing_function is None
        and layer.e_score_correction_bias is None
        and layer.routed_scaling_factor == 1.0
        and not layer.apply_router_weight_on_input
    )
    return None if is_plain else EXPERT_ROUTING
