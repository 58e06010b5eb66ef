"""Sampling parameters of a request: words, seeds, checks of logprobs, and draft options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers import TokenizeParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestState

from rbln_backend.api.names import EXTRA_ARGS, Prediction
from server.errors import InvalidValueError
from server.request.record import RequestRecord, record_var

FORBIDDING = ("allowed_token_ids", "bad_words", "min_tokens", "stop_token_ids")
"""Fields that forbid tokens: the last one before `min_tokens`, or in the middle of a grammar."""

MAX_ENTRIES = 1_000_000
"""Of a prompt, or of an answer: some 60 MB of JSON."""
_ORDINARY = 20
"""OpenAI's limit for each token and vLLM's default. Within it, the context bounds the total."""

_BEFORE = "\n"
"""A text before a word that no tokenizer joins with it: a word's tokens depend on its place."""


def bad_word_ids(words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return the token ids of `bad_words` at the start of a text, in a line and behind a space.

    A word that begins with white space is meant as it is. vLLM leaves out the form with a space if
    it has another number of tokens, and strips a word's own white space.
    """
    ids_by_word: dict[tuple[int, ...], None] = {}
    before = tokenizer.encode(_BEFORE, add_special_tokens=False)
    for word in words:
        for text in (word,) if word[:1].isspace() else (word, f" {word}"):
            ids_by_word[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
            behind = tokenizer.encode(_BEFORE + text, add_special_tokens=False)
            if behind[: len(before)] == before:
                ids_by_word[tuple(behind[len(before) :])] = None
    return [list(ids) for ids in ids_by_word if ids]


def no_token_left(forbidding: Sequence[str], *, guided: bool) -> InvalidValueError:
    """Return the error of an answer at a position where every token is forbidden."""
    names = " and ".join(map(repr, forbidding))
    allowed = "that its grammar allows here" if guided else "that may come next"
    verb = "forbid" if len(forbidding) > 1 else "forbids"
    return InvalidValueError(
        f"The answer cannot go on: {names} {verb} every token {allowed}.", param=forbidding[0]
    )


def child_seed(seed: int, index: int) -> int:
    """Return the seed of the answer `index` of a request with `n`; the first has the request's own.

    vLLM adds the index, so that an answer would be drawn like those of the next seed.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def check_logprobs(params: SamplingParams, prompt: Any, vocab_size: int) -> None:
    """Raise `VLLMValidationError` for a request with more than `MAX_ENTRIES` logprobs."""
    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if params.prompt_logprobs is not None and tokens is not None:
        _check_entries("prompt_logprobs", params.prompt_logprobs, len(tokens), vocab_size)
    wanted = params.logprobs
    if wanted is not None and (wanted > _ORDINARY or wanted < 0) and params.max_tokens is not None:
        _check_entries("logprobs", wanted, params.max_tokens * params.n, vocab_size)


def _check_entries(name: str, number: int, tokens: int, vocab_size: int) -> None:
    each = (vocab_size if number < 0 else number) + 1
    if each * tokens > MAX_ENTRIES:
        # As vLLM names parameters: the client may have sent it in another field.
        raise VLLMValidationError(
            f"{tokens} tokens with {each} log-probabilities each are {each * tokens}; an answer "
            f"may have {MAX_ENTRIES}.",
            parameter=name,
        )


def set_draft_options(
    params: SamplingParams, record: RequestRecord | None, prompt: Any, predicted: list[int]
) -> None:
    """Set the draft options of `params`, over whatever a client's `vllm_xargs` has there.

    `predicted` are the token ids of the predicted text.
    """
    options = {
        "off": record is not None and record.drafts.off,
        "prediction": predicted,
        "key": _owner(record, prompt),
    }
    params.extra_args = {**(params.extra_args or {}), EXTRA_ARGS: options}


async def predicted_tokens(engine: AsyncLLM, text: str) -> list[int]:
    """Return the token ids of a predicted text, at most as many as the context has."""
    if not text:
        return []
    params = TokenizeParams(
        max_total_tokens=None, truncate_prompt_tokens=None, add_special_tokens=False
    )
    tokens = await engine.renderer.tokenize_prompt_async({"prompt": text}, params)
    return list(tokens["prompt_token_ids"][: engine.model_config.max_model_len])  # type: ignore[typeddict-item]


def prediction_counts(predicted: list[int], states: list[RequestState]) -> tuple[int, int]:
    """Return how many predicted tokens the answer has at their position, and how many it lacks."""
    prediction = Prediction(predicted)
    for state in states:
        if state.detokenizer is not None:
            prediction.extend(state.detokenizer.output_token_ids)
    matched = min(prediction.matched, len(predicted))
    return matched, len(predicted) - matched


def _owner(record: RequestRecord | None, prompt: Any) -> str | None:
    """Return the owner whose texts may serve as drafts: the API key's, and the cache salt."""
    owner = None if record is None else record.caller.owner or None
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    return owner if salt is None else json.dumps([owner, salt])


def add_prediction_counts(usage: Any) -> None:
    """Add the counts of predicted tokens to vLLM's usage of a whole answer.

    A predicted token is *accepted* if the answer has it at its position, else *rejected*.
    """
    record = record_var.get()
    if usage is None or record is None or record.tokens.prediction is None:
        return
    from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

    accepted, rejected = record.tokens.prediction()
    known = usage.completion_tokens_details
    usage.completion_tokens_details = CompletionTokenUsageInfo(
        # Set although it is the default: streams omit unset fields.
        reasoning_tokens=0 if known is None else known.reasoning_tokens,
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=rejected,
    )
