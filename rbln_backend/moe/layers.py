"""vLLM's mixture-of-experts layers as operators of the captured graph.

vLLM hides a layer's experts behind an op that looks the layer up by name while it runs, and leaves
the kernel to out-of-tree platforms. Here the layer is traced like any other: its method routes and
computes by the path that was chosen when the layer was made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rbln_backend.devices.port import Capabilities, device_capabilities
from rbln_backend.graphs.operators import check_ops
from rbln_backend.moe.experts import Experts, hold_experts
from rbln_backend.moe.glu_op import run_glu_op
from rbln_backend.moe.paths import (
    Choice,
    ExpertPath,
    PathName,
    RoutedTokens,
    choose_path,
    run_custom,
    run_opt,
    run_plain,
)
from rbln_backend.moe.routing import SCORINGS, Routing
from rbln_backend.reporting.reports import ExpertsInfo
from rbln_backend.unsupported import EXPERT_ACTIVATION, EXPERT_ROUTING, Feature
from rbln_backend.vllm_compat.surface import (
    CustomOp,
    MoERunner,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
    ZeroExpertRouter,
    configured,
    get_current_vllm_config,
)

PATHS: Mapping[PathName, ExpertPath] = {
    "opt": run_opt,
    "custom": run_custom,
    "glu": run_glu_op,
    "native": run_plain,
}
_ACTIVATIONS = ("silu", "swigluoai")


class RblnMoERunner(MoERunner):
    """A mixture-of-experts layer that Dynamo sees through."""

    def __init__(self, layer_name: str, *args: Any, **options: Any) -> None:
        super().__init__(layer_name, *args, **options)
        # What such routers do outside of a layer's experts is not in the method's hands.
        if isinstance(self.router, ZeroExpertRouter) or _reads_token_ids(self.router):
            raise EXPERT_ROUTING.refusal(layer_name)

    def _select_forward(self) -> Callable[..., Any]:
        return self._forward_traced

    def _encode_layer_name(self) -> str:
        return str(self.layer_name)

    def _maybe_dispatch(
        self, hidden_states: Tensor, router_logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[T, ...] of this rank to [ranks * T, ...] of all data-parallel ones."""
        ranks = self.moe_config.dp_size
        if ranks == 1:
            return hidden_states, router_logits
        gather = torch.ops.rbln_collectives.all_gather
        return gather(hidden_states, 0, ranks, "dp"), gather(router_logits, 0, ranks, "dp")

    def _maybe_combine(self, shared_output: Tensor | None, hidden_states: Any) -> Any:
        """Each data-parallel rank gets the sum of its own rows; vLLM adds up the others."""
        ranks = self.moe_config.dp_size
        if ranks > 1:
            scatter = torch.ops.rbln_collectives.reduce_scatter
            hidden_states = scatter(hidden_states, 0, ranks, "dp")
        return hidden_states if self.shared_experts is None else (shared_output, hidden_states)

    def _sequence_parallel_context(self) -> AbstractContextManager[None]:
        """Rows are not split among tensor-parallel ranks: the platform refuses what would."""
        return nullcontext()

    def _forward_traced(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        shared_experts_input: Tensor | None,
        input_ids: Tensor | None,
        *_: object,
    ) -> Any:
        """Run the layer as upstream's op does after its look-up."""
        return self._forward_impl(hidden_states, router_logits, shared_experts_input, input_ids)


class RblnMoEMethod(UnquantizedFusedMoEMethod):
    """Gated experts of any top-k routing, with or without biases."""

    choice: Choice
    routing: Routing
    experts: Experts
    here: Sequence[int]
    """As in ``RoutedTokens``."""
    capabilities: Capabilities
    sdk_op = "custom_moe_glu"
    """The op of an NPU."""
    tokens_mask: Tensor | None = None
    """An input of the graph that is being captured: float32 [T, 1], 0 in padding."""

    @property
    def is_monolithic(self) -> bool:
        """Routing belongs to the method: vLLM's own routers call kernels that are not here."""
        return True

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """As upstream; raises ``UnsupportedModelError`` where no path supports the layer."""
        self.choose(layer)
        super().create_weights(layer, *args, **kwargs)

    def choose(self, layer: Any) -> None:
        """Choose the path; raises ``UnsupportedModelError`` where no path supports the layer."""
        missing = _missing_feature(layer)
        if missing is not None:
            raise missing.refusal(layer.layer_name)
        rbln = configured(get_current_vllm_config())
        self.capabilities = device_capabilities(rbln)
        self.choice = choose_path(
            use_opt=rbln.moe_use_opt_kernel,
            use_custom=rbln.moe_custom_kernel,
            has_fused_op=self.capabilities.fused_experts,
            activation=layer.activation.value,
        )
        if self.choice.path == "glu":
            check_ops(self.sdk_op)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Give the experts the layout of the device, one layer at a time."""
        super().process_weights_after_loading(layer)
        self.hold(layer, hold_experts(layer, packs=self.capabilities.packed_weights))

    def hold(self, layer: Any, experts: Experts) -> None:
        """Compute with ``experts`` from now on, as ``layer`` routes."""
        # The runner would otherwise make it while it is traced.
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.routing = routing_of(layer)
        self.experts = experts
        self.here = _numbers_here(layer)

    def apply_monolithic(
        self,
        layer: RoutedExperts,
        x: Tensor,
        router_logits: Tensor,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """x [T, H], router_logits [T, E]; returns [T, H]."""
        tokens = RoutedTokens(
            *(x, router_logits, layer.expert_map, self.tokens_mask),
            here=self.here,
            on_host=self.capabilities.runs_on_host,
        )
        return PATHS[self.choice.path](tokens, self.routing, self.experts)


def routing_of(layer: RoutedExperts) -> Routing:
    """Return the routing of ``layer``, in the order in which vLLM selects a router."""
    groups = (layer.num_expert_group or 1) if layer.use_grouped_topk else 1
    if groups >= layer.global_num_experts or layer.global_num_experts % groups:
        groups = 1
    return Routing(
        top_k=layer.top_k,
        renormalize=layer.renormalize,
        scoring=layer.scoring_func,
        groups=groups,
        top_groups=layer.topk_group or 1,
        bias=layer.e_score_correction_bias,
        scale=layer.routed_scaling_factor,
        function=None if groups > 1 else layer.custom_routing_function,
        on_input=layer.apply_router_weight_on_input,
    )


def _numbers_here(layer: RoutedExperts) -> Sequence[int]:
    if layer.expert_map is None:
        return range(layer.global_num_experts)
    local = enumerate(layer.expert_map.tolist())
    return [everywhere for number, everywhere in sorted((n, e) for e, n in local) if number >= 0]


def moe_methods(model: nn.Module) -> list[RblnMoEMethod]:
    """The methods of all mixtures of ``model``, in its order."""
    layers = (module for module in model.modules() if isinstance(module, RoutedExperts))
    return [layer.quant_method for layer in layers if isinstance(layer.quant_method, RblnMoEMethod)]


def experts_info(model: nn.Module, *, tokens_mask: bool) -> ExpertsInfo | None:
    """Describe the expert layers of ``model`` for operators; the first stands for all."""
    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    methods = moe_methods(model)
    if not methods:
        return None
    return ExpertsInfo(
        path=methods[0].choice.path,
        reason=methods[0].choice.reason,
        tokens_mask=tokens_mask,
        layers=len(layers),
        experts=layers[0].global_num_experts,
        local=layers[0].local_num_experts,
        ranks=layers[0].moe_config.ep_size,
    )


def install_expert_layers() -> None:
    """Register both classes with vLLM, for every device; idempotent, once per process."""
    for name, layer in (
        ("MoERunner", RblnMoERunner),
        ("UnquantizedFusedMoEMethod", RblnMoEMethod),
    ):
        if layer.__dict__.get("name") is None:
            CustomOp.register_oot(name=name)(layer)


def _reads_token_ids(router: Any) -> bool:
    """Routers of DeepSeek-V4: by a table of tokens, or by what stands for an image."""
    tables = ("_hash_indices_table", "bias_vl")
    return any(getattr(router, name, None) is not None for name in tables)


def _missing_feature(layer: RoutedExperts) -> Feature | None:
    """The first thing that this layer needs and no path has, or None."""
    if layer.activation.value not in _ACTIVATIONS or layer.swiglu_limit is not None:
        return EXPERT_ACTIVATION
    several = layer.top_k > 1 or layer.use_grouped_topk
    weighs_inputs = layer.apply_router_weight_on_input and several
    if weighs_inputs or layer.scoring_func not in SCORINGS:
        return EXPERT_ROUTING
    return None
