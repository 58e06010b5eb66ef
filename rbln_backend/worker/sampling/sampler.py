"""vLLM's sampler: log-probabilities of each request alone, and a short way for greedy steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rbln_backend.vllm_compat.surface import (
    LogitBiasLogitsProcessor,
    LogprobsTensors,
    MinTokensLogitsProcessor,
    Sampler,
    SamplerOutput,
    SamplingMetadata,
)


class RowSampler(Sampler):
    """Upstream's sampler, which gives every request the log-probabilities that it wants.

    Where one request of a step names tokens (``logprob_token_ids``), upstream returns columns for
    these to all of them, in the place of their likeliest tokens.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_likeliest: int | None = None

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any
    ) -> SamplerOutput:
        self._num_likeliest = sampling_metadata.max_num_logprobs
        return super().forward(logits, sampling_metadata, *args, **options)

    def gather_specific_token_logprobs(
        self, logprobs: Tensor, logprob_token_ids: dict[int, list[int]], sampled: Tensor
    ) -> LogprobsTensors | None:
        """Name the likeliest tokens of the rows that name none; ``logprobs`` [rows, V]."""
        named = logprob_token_ids
        if self._num_likeliest:
            likeliest = logprobs.topk(self._num_likeliest).indices.tolist()
            named = dict(enumerate(likeliest)) | named
        return super().gather_specific_token_logprobs(logprobs, named, sampled)


class GreedySampler(RowSampler):
    """Where upstream would only look for each row's largest logit, a kernel does.

    Upstream first copies the logits to float32, which changes no order.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._seen: SamplingMetadata | None = None
        self._is_plain = False

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any
    ) -> SamplerOutput:
        if args or options or not self.takes_largest(sampling_metadata):
            return super().forward(logits, sampling_metadata, *args, **options)
        sampled = torch.ops.rbln_emulator.greedy(logits)
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=None)

    def takes_largest(self, metadata: SamplingMetadata) -> bool:
        """Whether a token is that of its row's largest logit, whatever was sampled before."""
        if metadata is not self._seen:
            # A batch keeps its metadata until a request joins or leaves.
            self._seen = metadata
            self._is_plain = _asks_for_largest(metadata)
        return self._is_plain and not _is_biased(metadata)


def _asks_for_largest(metadata: SamplingMetadata) -> bool:
    """Whether nothing that lasts as long as the batch stands between logits and tokens."""
    return (
        metadata.all_greedy
        and metadata.no_penalties
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and not metadata.bad_words_token_ids
        and metadata.allowed_token_ids_mask is None
        and metadata.thinking_budget_state_holder is None
        and all(
            isinstance(processor, LogitBiasLogitsProcessor | MinTokensLogitsProcessor)
            for processor in metadata.logitsprocs.non_argmax_invariant
        )
    )


def _is_biased(metadata: SamplingMetadata) -> bool:
    """Whether a request has a bias or a minimum length, which it may reach at any step."""
    for processor in metadata.logitsprocs.non_argmax_invariant:
        if isinstance(processor, LogitBiasLogitsProcessor):
            if processor.biases:
                return True
        elif isinstance(processor, MinTokensLogitsProcessor) and processor.min_toks:
            return True
    return False


def drawing(metadata: SamplingMetadata, rows: Sequence[int]) -> SamplingMetadata:
    """The metadata with the generators of ``rows`` alone: those of others do not advance."""
    if metadata.generators.keys() <= set(rows):
        return metadata
    own = {row: generator for row, generator in metadata.generators.items() if row in rows}
    return replace(metadata, generators=own)
