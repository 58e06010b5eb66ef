"""Sampling of a step that checks drafts: gives the tokens that steps of one token would give.

A draft is right if it is what would be sampled at its position. Greedy tokens of all positions are
sampled at once, or read where the graph picked them. Where a token depends on those before it
(penalties, a generator's state), each position is sampled as a step of its own, for the requests
whose drafts were right so far: a request's generator advances once for each of its tokens and for
no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, SamplerOutput

from rbln_backend.core import StepBatch, StepOutputs
from rbln_backend.worker.batch import RequestBatches
from rbln_backend.worker.sampling import GreedySampler, RowSampler, with_generators


class Sampled(NamedTuple):
    """Tokens and log-probabilities of one step."""

    token_ids: list[list[int]]
    """By request: its right drafts, and the token after them."""
    logprobs: LogprobsLists | None


class Verification:
    """Samples the tokens of VERIFY steps and records them in the batches."""

    def __init__(
        self, sampler: RowSampler, batches: RequestBatches, *, is_picked: bool = False
    ) -> None:
        """``is_picked``: the last output of a VERIFY graph is the tokens of its largest logits."""
        self._sampler = sampler
        self._batches = batches
        self._is_picked = is_picked

    def take_picked(self, batch: StepBatch, outputs: StepOutputs) -> list[list[int]] | None:
        """Record and return the tokens that the graph picked, by request; no logits are read.

        None if it picks none, or if a token of the step may not be that of its largest logit.
        """
        metadata = batch.input_batch.sampling_metadata
        if not (self._is_picked and self._sampler.takes_largest(metadata)):
            return None
        # [bucket, length], with padding behind the drafts of each request.
        return self._accept(batch, outputs[-1][: batch.num_reqs].tolist())

    def sample(self, batch: StepBatch, logits: Tensor) -> Sampled:
        """Sample from logits [tokens of the step, V], request by request; record the tokens."""
        metadata = batch.input_batch.sampling_metadata
        if not (isinstance(self._sampler, GreedySampler) and self._sampler.takes_largest(metadata)):
            return self._sample_by_position(batch, logits)
        largest = self._sampler(logits=logits, sampling_metadata=metadata)
        tokens = largest.sampled_token_ids.flatten().tolist()
        by_request = [tokens[first : first + batch.length] for first in _firsts(batch)]
        return Sampled(self._accept(batch, by_request), None)

    def _accept(self, batch: StepBatch, tokens: Sequence[list[int]]) -> list[list[int]]:
        """Record and return the right drafts of each request and the token after them.

        ``tokens``: by request, those of its positions, and any behind them.
        """
        accepted = [
            sampled[: 1 + _num_right(drafts, sampled)]
            for drafts, sampled in zip(batch.drafts, tokens, strict=True)
        ]
        self._batches.record(batch, accepted)
        return accepted

    def _sample_by_position(self, batch: StepBatch, logits: Tensor) -> Sampled:
        firsts = _firsts(batch)
        active, results = list(range(batch.num_reqs)), _Results(batch.num_reqs)
        for position in range(batch.length):
            # Rows of requests that are done are sampled as well, and the tokens dropped.
            rows = [
                first + min(position, len(drafts))
                for first, drafts in zip(firsts, batch.drafts, strict=True)
            ]
            sampled = self._sampler(
                logits=logits[torch.tensor(rows)],
                sampling_metadata=with_generators(batch.input_batch.sampling_metadata, active),
            )
            tokens = results.add(sampled, active)
            self._batches.record(batch, tokens)
            active = [
                row
                for row in active
                if position < len(batch.drafts[row])
                and batch.drafts[row][position] == tokens[row][0]
            ]
            if not active:
                break
            # As before any step: minimum lengths, for example, depend on the recorded tokens.
            batch.input_batch.refresh_metadata()
        return results.sampled()


@dataclass(slots=True)
class _Results:
    """Tokens and log-probabilities, added by position and returned by request."""

    num_reqs: int
    token_ids: list[list[int]] = field(init=False)
    _logprobs: list[LogprobsTensors] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = [[] for _ in range(self.num_reqs)]

    def add(self, sampled: SamplerOutput, active: Sequence[int]) -> list[list[int]]:
        """Add the tokens of one position for the rows ``active``; return them by request."""
        tokens: list[list[int]] = [[] for _ in range(self.num_reqs)]
        drawn = sampled.sampled_token_ids.tolist()
        for row in active:
            tokens[row] = drawn[row]
            self.token_ids[row] += drawn[row]
        if sampled.logprobs_tensors is not None:
            self._logprobs.append(sampled.logprobs_tensors)
        return tokens

    def sampled(self) -> Sampled:
        if not self._logprobs:
            return Sampled(self.token_ids, None)
        order = torch.tensor(
            [
                position * self.num_reqs + row
                for row, tokens in enumerate(self.token_ids)
                for position in range(len(tokens))
            ]
        )
        ids, logprobs, ranks = (
            # For the whole vocabulary there are values alone.
            torch.cat(parts)[order] if parts[0].numel() else parts[0]
            for parts in zip(*(tensors[:3] for tensors in self._logprobs), strict=True)
        )
        starts = [0, *accumulate(map(len, self.token_ids))]
        return Sampled(self.token_ids, LogprobsTensors(ids, logprobs, ranks).tolists(starts))


def _firsts(batch: StepBatch) -> list[int]:
    counts = [1 + len(drafts) for drafts in batch.drafts]
    return [end - count for end, count in zip(accumulate(counts), counts, strict=True)]


def _num_right(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    for position, draft in enumerate(drafts):
        if draft != tokens[position]:
            return position
    return len(drafts)
