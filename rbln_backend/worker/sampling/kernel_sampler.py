"""Sampling in the emulator's kernels, which select where vLLM's code sorts the vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rbln_backend.vllm_compat.surface import (
    LogprobsTensors,
    MinPLogitsProcessor,
    SamplerOutput,
    SamplingMetadata,
)
from rbln_backend.worker.sampling.output_tokens import OutputTokens
from rbln_backend.worker.sampling.picks import KernelPicks, TokenPicks, picked_by_graph
from rbln_backend.worker.sampling.sampler import GreedySampler, RowSampler


class KernelSampler(GreedySampler):
    """A ``GreedySampler`` with kernels for draws, penalties and log-probabilities, on every core.

    A draw takes 64 random bits of its request's generator, or of torch's own for requests without a
    seed: the same seed gives the same tokens in any company. vLLM's code draws where a processor of
    a plug-in takes part.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._outputs = OutputTokens()

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any
    ) -> SamplerOutput:
        """Sample from logits [rows, V] as upstream."""
        metadata = sampling_metadata
        if args or options:
            return super().forward(logits, metadata, *args, **options)
        if self._reports(metadata):
            return self._sample_and_report(logits, metadata)
        if metadata.all_greedy or not (
            self.takes_logits_alone(metadata) and self._draws_here(metadata)
        ):
            return super().forward(logits, metadata)
        # Without upstream's copy in float32.
        return SamplerOutput(sampled_token_ids=_draw(logits, metadata), logprobs_tensors=None)

    # Upstream calls its static function as a method.
    def apply_penalties(  # type: ignore[override]
        self, logits: Tensor, sampling_metadata: SamplingMetadata, output_token_ids: list[list[int]]
    ) -> Tensor:
        """Return float32 logits [rows, V] with the penalties, changed in place."""
        metadata = sampling_metadata
        if not metadata.no_penalties:
            torch.ops.rbln_emulator.penalize_(
                logits,
                metadata.prompt_token_ids,
                *self._outputs.joined(output_token_ids),
                metadata.presence_penalties,
                metadata.frequency_penalties,
                metadata.repetition_penalties,
            )
        return logits

    def _sample_rows(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Draw from logits [rows, V]: int32 [rows], and processed values if any are returned."""
        metadata = sampling_metadata
        if args or options or not self._draws_here(metadata):
            return super()._sample_rows(logits, metadata, *args, **options)
        drawn = (
            torch.ops.rbln_emulator.greedy(logits)
            if metadata.all_greedy
            else _draw(logits, metadata)
        ).view(-1)
        if "processed" not in self.logprobs_mode or not _has_reports(metadata):
            return drawn, None
        # vLLM's own draws are dropped, and advance no request's generator.
        _, processed = super()._sample_rows(logits, replace(metadata, generators={}))
        return drawn, processed

    def _reports(self, metadata: SamplingMetadata) -> bool:
        """Return True if raw values of logits are returned."""
        is_raw = metadata.max_num_logprobs != -1 and "raw" in self.logprobs_mode
        return is_raw and _has_reports(metadata)

    def _sample_and_report(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        silent = replace(metadata, max_num_logprobs=None, logprob_token_ids=None)
        raw = logits
        is_kept = self.takes_logits_alone(silent) and self._draws_here(silent)
        if logits.dtype == torch.float32 and not is_kept:
            # Upstream changes logits of this type in place.
            raw = logits.clone()
        sampled = self.forward(logits, silent).sampled_token_ids
        is_normalized = self.logprobs_mode == "raw_logprobs"
        reported = LogprobsTensors(
            *torch.ops.rbln_emulator.top_logprobs(
                raw, sampled.view(-1).clamp(min=0), metadata.max_num_logprobs or 0, is_normalized
            )
        )
        if metadata.logprob_token_ids:
            reported = _with_named(reported, raw, metadata.logprob_token_ids, is_normalized)
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=reported)

    def _draws_here(self, metadata: SamplingMetadata) -> bool:
        """Return True if the kernel knows everything that takes part in the draw."""
        return all(
            type(processor) is MinPLogitsProcessor
            for processor in metadata.logitsprocs.argmax_invariant
        )


def _has_reports(metadata: SamplingMetadata) -> bool:
    """Return True if a request has log-probabilities, or logits in their place."""
    return metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)


def _with_named(
    reported: LogprobsTensors, logits: Tensor, named: dict[int, list[int]], is_normalized: bool
) -> LogprobsTensors:
    """Replace the likeliest tokens of rows of logits [rows, V] by those that requests name.

    The same kernel makes the values, so that no other row's depend on them.
    """
    rows, count = reported.logprobs.shape
    width = max(count, *(1 + len(tokens) for tokens in named.values()))
    ids = torch.zeros(rows, width, dtype=torch.int32)
    values = torch.full((rows, width), -torch.inf)
    ids[:, :count], values[:, :count] = reported.logprob_token_ids, reported.logprobs
    for row, tokens in named.items():
        ids[row, 1:], values[row, 1:] = 0, -torch.inf
        own = torch.tensor(tokens, dtype=torch.int32)
        _, of_own, _ = torch.ops.rbln_emulator.top_logprobs(
            logits[row].expand(len(own), -1), own, 0, is_normalized
        )
        ids[row, 1 : 1 + len(own)], values[row, 1 : 1 + len(own)] = own, of_own.view(-1)
    return LogprobsTensors(ids, values, reported.selected_token_ranks)


def make_sampler(logprobs_mode: Any, *, runs_on_host: bool) -> RowSampler:
    """Return the sampler of a device; kernels of ours are there if graphs run on the host."""
    sampler_class = KernelSampler if runs_on_host else RowSampler
    return sampler_class(logprobs_mode=logprobs_mode)


def make_picks(*, by_graph: bool, runs_on_host: bool) -> TokenPicks | None:
    """Return the picks of a device whose graphs end in argmax, or run on the host."""
    if by_graph:
        return picked_by_graph
    return KernelPicks() if runs_on_host else None


def _draw(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Draw a token of each row of logits [rows, V]: int32 [rows, 1]."""
    drawn: Tensor = torch.ops.rbln_emulator.sample(
        logits,
        metadata.temperature,
        metadata.top_k,
        metadata.top_p,
        _min_p(metadata),
        _randoms(metadata, logits.shape[0]),
    )
    return drawn


def _min_p(metadata: SamplingMetadata) -> Tensor | None:
    """Return the min_p of each row; None if no request has one."""
    for processor in metadata.logitsprocs.argmax_invariant:
        if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
            min_p: Tensor = processor.min_p
            return min_p.view(-1)
    return None


def _randoms(metadata: SamplingMetadata, rows: int) -> Tensor:
    """Return 64 random bits for each row; generators of requests advance by one draw."""
    randoms = torch.empty(rows, dtype=torch.int64).random_(-(2**63), None)
    for row, generator in metadata.generators.items():
        randoms[row : row + 1].random_(-(2**63), None, generator=generator)
    return randoms
