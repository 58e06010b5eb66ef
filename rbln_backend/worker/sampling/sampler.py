"""vLLM's sampler, with log-probabilities by request and a fast path for greedy steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rbln_backend.config import NO_TOKEN
from rbln_backend.vllm_compat.surface import (
    LogitBiasLogitsProcessor,
    LogprobsTensors,
    MinTokensLogitsProcessor,
    Sampler,
    SamplerOutput,
    SamplingMetadata,
)


class RowSampler(Sampler):
    """Upstream's sampler with the log-probabilities that each request has parameters for.

    If one request of a step has ``logprob_token_ids``, upstream returns the columns of these tokens
    to all requests, instead of their likeliest tokens.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_likeliest: int | None = None
        self._latest: SamplingMetadata | None = None
        self._has_no_edits = False

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any
    ) -> SamplerOutput:
        """Sample from logits [rows, V] as upstream."""
        self._num_likeliest = sampling_metadata.max_num_logprobs
        return super().forward(logits, sampling_metadata, *args, **options)

    def sample(self, logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """As upstream, from logits [rows, V] with their edits.

        Rows in which every token is forbidden get ``NO_TOKEN``; upstream returns token 0.
        """
        sampled, processed = self._sample_rows(logits, *args, **options)
        # Where all are forbidden, the one that was taken is, too.
        taken = logits.gather(1, sampled.view(-1, 1).long()).view(-1)
        return sampled.masked_fill(taken == -torch.inf, NO_TOKEN), processed

    def _sample_rows(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        drawn: tuple[Tensor, Tensor | None] = super().sample(*args, **options)
        return drawn

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Gather as upstream; for ``NO_TOKEN``, whose row is not returned, those of token 0."""
        return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids.clamp(min=0))

    def gather_specific_token_logprobs(
        self, logprobs: Tensor, logprob_token_ids: dict[int, list[int]], sampled: Tensor
    ) -> LogprobsTensors | None:
        """Gather as upstream; rows without ``logprob_token_ids`` get their likeliest tokens.

        ``logprobs`` [rows, V], ``sampled`` [rows].
        """
        sampled = sampled.clamp(min=0)
        named = logprob_token_ids
        if self._num_likeliest:
            likeliest = logprobs.topk(self._num_likeliest).indices.tolist()
            named = dict(enumerate(likeliest)) | named
        return super().gather_specific_token_logprobs(logprobs, named, sampled)

    def takes_largest(self, metadata: SamplingMetadata) -> bool:
        """Return True if every row's token is that of its largest logit."""
        return metadata.all_greedy and self.takes_logits_alone(metadata)

    def takes_logits_alone(self, metadata: SamplingMetadata) -> bool:
        """Return True if no request changes logits before they are sampled, or reports any."""
        if metadata is not self._latest:
            # A batch keeps its metadata until a request joins or leaves.
            self._latest = metadata
            self._has_no_edits = _has_no_edits(metadata)
        return self._has_no_edits and not _is_biased(metadata)


class GreedySampler(RowSampler):
    """A ``RowSampler`` that takes the largest logit of each row in a kernel where that is all.

    Upstream copies the logits to float32 first, which does not change their order.
    """

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any
    ) -> SamplerOutput:
        """Sample from logits [rows, V] as upstream."""
        if args or options or not self.takes_largest(sampling_metadata):
            return super().forward(logits, sampling_metadata, *args, **options)
        sampled = torch.ops.rbln_emulator.greedy(logits)
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=None)


def _has_no_edits(metadata: SamplingMetadata) -> bool:
    """Return True if no parameter but a bias or a minimum length changes or reports logits."""
    return (
        metadata.no_penalties
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
    """Return True if a request has a bias, or a minimum length that it has not reached."""
    for processor in metadata.logitsprocs.non_argmax_invariant:
        if isinstance(processor, LogitBiasLogitsProcessor):
            if processor.biases:
                return True
        elif isinstance(processor, MinTokensLogitsProcessor) and processor.min_toks:
            return True
    return False


def with_generators(metadata: SamplingMetadata, rows: Sequence[int]) -> SamplingMetadata:
    """Return the metadata with the generators of ``rows`` alone: others do not advance."""
    if metadata.generators.keys() <= set(rows):
        return metadata
    own = {row: generator for row, generator in metadata.generators.items() if row in rows}
    return replace(metadata, generators=own)
