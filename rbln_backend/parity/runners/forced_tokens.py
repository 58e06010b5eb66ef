"""Logits processor that makes a request follow given tokens.

vLLM reads log-probabilities from the raw logits, before any processor: they are the engine's own,
while the sequence is the reference's.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

FORCED_TOKENS = "forced_tokens"


class ForcedTokens(AdapterLogitsProcessor):
    """Follows ``SamplingParams.extra_args["forced_tokens"]`` of requests that have it."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], Tensor], Tensor] | None:
        """Return the processor of a request's logits [V]; None without forced tokens."""
        forced: list[int] | None = (params.extra_args or {}).get(FORCED_TOKENS)
        if forced is None:
            return None

        def follow(output_ids: list[int], logits: Tensor) -> Tensor:
            """Set ``logits`` [V] so that the next forced token is chosen."""
            logits.fill_(float("-inf"))
            logits[forced[len(output_ids)]] = 0.0
            return logits

        return follow
