"""vLLM's mixture-of-experts layers as operators of the captured graph.

vLLM hides a layer's experts behind an op that looks the layer up by name while it runs, and leaves
the kernel to out-of-tree platforms. Here the layer is traced like any other: its method routes and
computes by one of the documented paths, which is chosen when the layer is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from rbln_backend.devices.port import Capabilities, device_capabilities
from rbln_backend.graphs.operators import check_ops
from rbln_backend.layers.experts import Experts, GluExperts, hold_experts
from rbln_backend.layers.routing import SCORINGS, Routing, local_ids, weights_by_expert
from rbln_backend.limits import EXPERT_ACTIVATION, EXPERT_ROUTING
from rbln_backend.reports.info import ExpertsInfo
from rbln_backend.settings import configured

PathName = Literal["opt", "custom", "glu", "native"]
"""As operators know them; ``native`` is the loop of plain operators."""

TOKENS_MASK = "tokens_mask"
"""The graph input that tells rows from padding."""
OPT_SWITCH = "VLLM_RBLN_MOE_USE_OPT_KERNEL"
CUSTOM_SWITCH = "VLLM_RBLN_MOE_CUSTOM_KERNEL"
# What the SDK's op computes itself: vllm-rbln 0.12 names SiLU and GELU.
_GLU_ACTIVATIONS = ("silu", "gelu")


class Choice(NamedTuple):
    """A path and why it was taken."""

    path: PathName
    reason: str


def choose_path(*, use_opt: bool, use_custom: bool, has_fused_op: bool, activation: str) -> Choice:
    """The optimised kernel before the custom one before plain operators.

    The SDK that pairs with vLLM 0.30 has a single op for both switches.
    """
    if not use_opt and not use_custom:
        return Choice("native", f"{OPT_SWITCH} and {CUSTOM_SWITCH} are off")
    if has_fused_op and activation not in _GLU_ACTIVATIONS:
        return Choice("native", f"the SDK's op for experts has no activation {activation!r}")
    if has_fused_op:
        return Choice("glu", "the SDK has one op for experts")
    if use_opt:
        return Choice("opt", f"{OPT_SWITCH} is on")
    return Choice("custom", f"{CUSTOM_SWITCH} is on and {OPT_SWITCH} off")


@dataclass
class RoutedTokens:
    """T rows on their way to a layer's experts."""

    x: Tensor
    """[T, H]."""
    logits: Tensor
    """[T, E], of the experts of all ranks."""
    expert_map: Tensor | None
    """int32 [E]: this rank's number of each expert, -1 for those of others; None: all are here."""
    tokens_mask: Tensor | None
    """float32 [T, 1]: 0 in padding; None: every row counts."""
    here: Sequence[int]
    """This rank's experts in its order, as all ranks number them."""
    on_host: bool
    """The graph runs on the emulated device."""

    def by_expert(self, routing: Routing, count: int) -> tuple[Tensor, Tensor]:
        """Return the experts' input and the weight of each of this rank's experts, 0 if not chosen.

        [T, H] and float32 [T, count].
        """
        x, weights, ids = routing.route(self.x, self.logits)
        here = local_ids(ids, self.expert_map, self.tokens_mask)
        return x, weights_by_expert(weights, here, count)


def run_opt(tokens: RoutedTokens, routing: Routing, experts: Experts) -> Tensor:
    """Tokens [T, H] to [T, H]: one op takes the router's logits, after routing it does not know."""
    x = tokens.x
    if routing.is_plain:
        weights, ids = torch.ops.rbln_emulator.moe_route(
            tokens.logits,
            routing.top_k,
            routing.renormalize,
            tokens.expert_map,
            tokens.tokens_mask,
        )
    else:
        x, weights, chosen = routing.route(x, tokens.logits)
        ids = local_ids(chosen, tokens.expert_map, tokens.tokens_mask)
    return experts.chosen(x, weights, ids)


def run_custom(tokens: RoutedTokens, routing: Routing, experts: Experts) -> Tensor:
    """Tokens [T, H] to [T, H]: one op takes each row's expert weights and rows per expert."""
    x, weights = tokens.by_expert(routing, experts.count)
    counts = (weights != 0).sum(dim=0, dtype=torch.int32)
    return experts.weighted(x, weights, counts)


def run_plain(tokens: RoutedTokens, routing: Routing, experts: Experts) -> Tensor:
    """Tokens [T, H] to [T, H]: every expert over every row, then weighted; several nodes each."""
    if tokens.on_host:
        # torch's kernels over columns make the bits of a row depend on the number of rows.
        x, weights = tokens.by_expert(routing, experts.count)
        shares, scale = [weights[:, n : n + 1] for n in range(experts.count)], 1.0
    else:
        x, weights = routing.spread(tokens.x, tokens.logits.float(), tokens.tokens_mask)
        shares, scale = [weights[number].unsqueeze(1) for number in tokens.here], routing.scale
    total = torch.zeros_like(x, dtype=torch.float32)
    for number, share in enumerate(shares):
        total = total + experts.expert(x, number).float() * share
    return (total if scale == 1.0 else total * scale).to(x.dtype)


def run_glu_op(tokens: RoutedTokens, routing: Routing, experts: GluExperts) -> Tensor:
    """Tokens [T, H] to [T, H]: one op of the SDK; experts are halves of w13."""
    x, by_expert = routing.spread(tokens.x, tokens.logits, tokens.tokens_mask)
    mixed = experts.glu(x, by_expert, tokens.expert_map)
    # As theirs: scaled behind the op, which leaves the chain to it as it is.
    return mixed if routing.scale == 1.0 else mixed * routing.scale


PATHS: Mapping[PathName, Callable[[RoutedTokens, Routing, Any], Tensor]] = {
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
        # Those of DeepSeek-V4 read token ids: by a table, or by what stands for an image.
        tables = ("_hash_indices_table", "bias_vl")
        reads_ids = any(getattr(self.router, name, None) is not None for name in tables)
        if isinstance(self.router, ZeroExpertRouter) or reads_ids:
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
    experts: Experts | GluExperts
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
        if layer.activation.value not in _ACTIVATIONS or layer.swiglu_limit is not None:
            raise EXPERT_ACTIVATION.refusal(layer.layer_name)
        several = layer.top_k > 1 or layer.use_grouped_topk
        weighs_inputs = layer.apply_router_weight_on_input and several
        if weighs_inputs or layer.scoring_func not in SCORINGS:
            raise EXPERT_ROUTING.refusal(layer.layer_name)
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

    def hold(self, layer: Any, experts: Experts | GluExperts) -> None:
        """Compute with ``experts`` from now on, as ``layer`` routes."""
        # The runner would otherwise make it while it is traced.
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.routing = get_routing(layer)
        self.experts = experts
        self.here = range(layer.global_num_experts)
        if layer.expert_map is not None:
            local = enumerate(layer.expert_map.tolist())
            self.here = [e for number, e in sorted((n, e) for e, n in local) if number >= 0]

    def apply_monolithic(
        self,
        layer: RoutedExperts,
        x: Tensor,
        router_logits: Tensor,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """x [T, H], router_logits [T, E]; returns [T, H]."""
        tokens = RoutedTokens(
            x,
            router_logits,
            layer.expert_map,
            self.tokens_mask,
            here=self.here,
            on_host=self.capabilities.runs_on_host,
        )
        return PATHS[self.choice.path](tokens, self.routing, self.experts)


def get_routing(layer: RoutedExperts) -> Routing:
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


def moe_methods(model: nn.Module) -> list[RblnMoEMethod]:
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
