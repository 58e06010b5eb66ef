"""Limit of the number of logprobs in one answer."""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams

from server.errors import InvalidValueError

MAX_ENTRIES = 1_000_000
"""Of a prompt, or of an answer: some 60 MB of JSON."""
_ORDINARY = 20
"""OpenAI's limit for each token and vLLM's default. Within it, the context bounds the total."""


def check_logprobs(params: SamplingParams, prompt: Any, vocab_size: int) -> None:
    """Raise `InvalidValueError` for a request with more than `MAX_ENTRIES` logprobs."""
    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if params.prompt_logprobs is not None and tokens is not None:
        _check("prompt_logprobs", params.prompt_logprobs, len(tokens), vocab_size)
    wanted = params.logprobs
    if wanted is not None and (wanted > _ORDINARY or wanted < 0) and params.max_tokens is not None:
        _check("logprobs", wanted, params.max_tokens * params.n, vocab_size)


def _check(name: str, number: int, tokens: int, vocab_size: int) -> None:
    each = (vocab_size if number < 0 else number) + 1
    if each * tokens > MAX_ENTRIES:
        raise InvalidValueError(
            f"'{name}': {tokens} tokens with {each} logprobs each are {each * tokens}; an answer "
            f"may have {MAX_ENTRIES}.",
            param=name,
        )
