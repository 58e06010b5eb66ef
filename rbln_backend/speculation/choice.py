"""The drafter of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rbln_backend.speculation.drafter import Drafter
from rbln_backend.speculation.ngram import NgramDrafter, NgramLimits
from rbln_backend.speculation.suffix import SuffixDrafter, SuffixLimits

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

DRAFT_METHODS = ("ngram", "suffix")
"""vLLM's names of the methods that need no draft model."""
DRAFT_MODELS = ("medusa", "eagle", "eagle3", "mtp")
"""vLLM's names of the methods with a draft model."""


def draft_model_of(config: VllmConfig) -> SpeculativeConfig | None:
    """Return the speculation by one of ``DRAFT_MODELS``, None without a draft model."""
    speculation = config.speculative_config
    return speculation if speculation is not None and speculation.method in DRAFT_MODELS else None


def make_drafter(config: SpeculativeConfig) -> Drafter:
    """Return a drafter of one of ``DRAFT_METHODS``."""
    if config.method == "suffix":
        limits = SuffixLimits(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
        )
        return SuffixDrafter(limits)
    smallest, largest = config.prompt_lookup_min, config.prompt_lookup_max
    assert smallest is not None and largest is not None
    return NgramDrafter(NgramLimits(smallest, largest))
