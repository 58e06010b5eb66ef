"""Log-probabilities of prompt tokens, gathered chunk by chunk during prefill."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rbln_backend.vllm_compat.surface import CachedRequestState, LogprobsTensors, Sampler

# (hidden rows [n, H] of a request) -> logits [n, V] in the model's dtype.
LogitsOf = Callable[[Tensor, CachedRequestState], Tensor]


class PromptLogprobs:
    """Collects ``prompt_logprobs`` of requests that have the parameter."""

    def __init__(self, sampler: Sampler, logits_of: LogitsOf, vocab_size: int) -> None:
        self._sampler = sampler
        self._logits_of = logits_of
        self._vocab_size = vocab_size

    def collect(
        self, request: CachedRequestState, hidden: Tensor | None, num_tokens: int
    ) -> LogprobsTensors | None:
        """Score a chunk of ``num_tokens`` tokens; return the prompt's table after the last chunk.

        ``hidden`` [>= num_tokens, H], or None for a step of one token, which has nothing to score:
        each row predicts the next prompt token, and the last row predicts a generated one.
        """
        num_logprobs = self._num_logprobs(request)
        if num_logprobs is None or request.prompt_token_ids is None:
            return None
        prompt = request.prompt_token_ids
        start = request.num_computed_tokens
        # A preempted request recomputes a prompt whose table was already returned.
        if start >= len(prompt) or request.output_token_ids:
            return None
        table = request.in_progress_prompt_logprobs_cpu
        if table is None:
            table = LogprobsTensors.empty_cpu(len(prompt) - 1, num_logprobs + 1)
            request.in_progress_prompt_logprobs_cpu = table
        count = min(num_tokens, len(prompt) - 1 - start)
        if count > 0 and hidden is not None:
            targets = torch.tensor(prompt[start + 1 : start + 1 + count])
            logits = self._logits_of(hidden[:count], request).to(torch.float32)
            self._score(table, logits, targets, start, num_logprobs)
        if start + num_tokens < len(prompt):
            return None
        request.in_progress_prompt_logprobs_cpu = None
        return table

    def _num_logprobs(self, request: CachedRequestState) -> int | None:
        params = request.sampling_params
        if params is None or params.prompt_logprobs is None:
            return None
        return self._vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs

    def _score(
        self, table: LogprobsTensors, logits: Tensor, targets: Tensor, start: int, num_logprobs: int
    ) -> None:
        scores = logits
        if "logits" not in self._sampler.logprobs_mode:
            scores = self._sampler.compute_logprobs(logits)
        found = self._sampler.gather_logprobs(scores, num_logprobs, targets)
        token_ids, logprobs, ranks, *_ = found
        rows = slice(start, start + len(targets))
        table.logprob_token_ids[rows] = token_ids
        table.logprobs[rows] = logprobs
        table.selected_token_ranks[rows] = ranks
