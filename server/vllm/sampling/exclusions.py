"""Constraints of one request that together forbid every token.

Where every token is forbidden, vLLM's sampler returns token 0 as if it were allowed.
"""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams

from server.errors import InvalidValueError

FORBIDDING = ("allowed_token_ids", "bad_words", "logit_bias", "min_tokens")
"""Fields that forbid tokens, with or without a grammar."""


def check_exclusions(params: SamplingParams, tokenizer: Any) -> None:
    """Raise `InvalidValueError` where `allowed_token_ids` has no token that may be sampled."""
    if not params.allowed_token_ids:
        return
    forbidden = set[int]()
    names = []
    if params.bad_words:
        params.update_from_tokenizer(tokenizer)
        forbidden |= {ids[0] for ids in params.bad_words_token_ids or () if len(ids) == 1}
        names.append("bad_words")
    if params.min_tokens:
        forbidden |= {tokenizer.eos_token_id, *(params.stop_token_ids or ())}
        names.append("min_tokens")
    if forbidden.issuperset(params.allowed_token_ids):
        raise InvalidValueError(
            f"'allowed_token_ids' allows no token that {' and '.join(map(repr, names))} does not "
            "forbid.",
            param="allowed_token_ids",
        )


def no_token_left(forbidding: list[str]) -> InvalidValueError:
    """Return the error of a guided answer at a position where every token is forbidden."""
    return InvalidValueError(
        f"The answer cannot go on: {' and '.join(map(repr, forbidding))} forbids every token that "
        "its grammar allows here.",
        param=forbidding[0],
    )
