"""The SDK's op for experts, as vllm-rbln 0.12 calls it; it never ran on an NPU here.

``rbln_custom_ops::custom_moe_glu`` has had three signatures. This is the one of the SDK that pairs
with vLLM 0.30 (reference/rbln-stack.md 5.3): gate and up [E, I, H], down [E, H, I], the routing
weights [E of all ranks, T] in the dtype of the logits, the activation's name, an expert map.
"""

from __future__ import annotations

from torch import Tensor

from rbln_backend.moe.experts import Experts, GluExperts
from rbln_backend.moe.paths import RoutedTokens
from rbln_backend.moe.routing import Routing


def run_glu_op(tokens: RoutedTokens, routing: Routing, experts: Experts) -> Tensor:
    """See ``ExpertPath``: tokens [T, H] to [T, H]; experts are halves of w13."""
    assert isinstance(experts, GluExperts)
    x, by_expert = routing.spread(tokens.x, tokens.logits, tokens.tokens_mask)
    mixed = experts.glu(x, by_expert, tokens.expert_map)
    # As theirs: scaled behind the op, which leaves the chain to it as it is.
    return mixed if routing.scale == 1.0 else mixed * routing.scale
