"""The drafter that a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rbln_backend.speculation.drafter import Drafter
from rbln_backend.speculation.ngram import NgramDrafter, NgramLimits
from rbln_backend.speculation.prediction import PredictionFirst
from rbln_backend.speculation.suffix import SuffixDrafter, SuffixLimits

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

DRAFT_METHODS = ("ngram", "suffix")
"""vLLM's names of the methods that need no second model."""


def make_drafter(asked: SpeculativeConfig, *, shared: bool) -> Drafter:
    """A drafter of one of ``DRAFT_METHODS``; what a client predicts comes before what it finds.

    ``shared``: finished answers are drafts for every key.
    """
    if asked.method == "suffix":
        limits = SuffixLimits(
            max_tree_depth=asked.suffix_decoding_max_tree_depth,
            max_cached_requests=asked.suffix_decoding_max_cached_requests,
            max_spec_factor=asked.suffix_decoding_max_spec_factor,
            min_token_prob=asked.suffix_decoding_min_token_prob,
            shared=shared,
        )
        return PredictionFirst(SuffixDrafter(limits))
    assert asked.prompt_lookup_min is not None and asked.prompt_lookup_max is not None
    return PredictionFirst(
        NgramDrafter(NgramLimits(asked.prompt_lookup_min, asked.prompt_lookup_max))
    )
