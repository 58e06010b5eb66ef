"""A logits processor that makes a request follow given tokens.

vLLM reads log-probabilities from the raw logits, before any processor, so they tell what the engine
thinks of the position while the sequence goes where the reference went.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

FORCED_TOKENS = "forced_tokens"


class ForcedTokens(AdapterLogitsProcessor):
    """Reads ``SamplingParams.extra_args["forced_tokens"]``; requests without it are left alone."""

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
            """``logits`` [V] of the next position."""
            logits.fill_(float("-inf"))
            logits[forced[len(output_ids)]] = 0.0
            return logits

        return follow
