"""Values of sampling parameters that vLLM refuses by another field's name, or by none.

`server.request.fields.ranges` has the bounds that depend on nothing else. Pure functions; values of
other types are left to the request models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from server.errors import InvalidValueError, describe
from server.request.fields.field import FieldKind
from server.request.fields.limits import RequestLimits
from server.request.fields.lookup import fields_of_kind
from server.request.fields.shared import LOGPROBS_FIELDS, MAX_TOKENS_FIELDS
from server.wire.endpoint import Endpoint, JsonObject

_GREEDY_BELOW = 1e-5
"""Temperatures that vLLM samples greedily."""
_REPETITION = "repetition_detection"


def check_sampling_values(
    endpoint: Endpoint, fields: JsonObject, limits: RequestLimits, defaults: Mapping[str, Any]
) -> None:
    """Raise `InvalidValueError` for the first value; `defaults` are the model's parameters."""
    _check_max_tokens(fields)
    _check_answers(fields, defaults)
    _check_logprobs(fields, limits)
    for name in (*fields_of_kind(endpoint, FieldKind.STOP), "bad_words"):
        _check_words(name, fields.get(name))
    if fields.get("allowed_token_ids") == [] and not fields.get("use_beam_search"):
        raise InvalidValueError("'allowed_token_ids' must not be empty.", param="allowed_token_ids")
    _check_repetition(fields.get(_REPETITION))


def _check_max_tokens(fields: JsonObject) -> None:
    """Check limits of answer tokens; 0 is for an `echo` without an answer."""
    lowest = 0 if fields.get("echo") else 1
    given = {name: fields[name] for name in MAX_TOKENS_FIELDS if _is_int(fields.get(name))}
    for name, value in given.items():
        if value < lowest:
            raise _invalid(name, f"be at least {lowest}", value)
    fewest = fields.get("min_tokens")
    # The first of these decides, if there are two.
    most = next((name for name in reversed(MAX_TOKENS_FIELDS) if given.get(name)), None)
    if most is not None and _is_int(fewest) and fewest > given[most]:
        raise _invalid("min_tokens", f"be at most '{most}', {given[most]}", fewest)


def _check_answers(fields: JsonObject, defaults: Mapping[str, Any]) -> None:
    """Check that a greedy request has one answer: all would be the same."""
    number, temperature = fields.get("n"), fields.get("temperature")
    if temperature is None:
        temperature = defaults.get("temperature")
    is_greedy = isinstance(temperature, int | float) and 0 <= temperature < _GREEDY_BELOW
    if is_greedy and _is_int(number) and number > 1 and not fields.get("use_beam_search"):
        raise _invalid("n", f"be 1 at a 'temperature' of {temperature}", number)


def _check_logprobs(fields: JsonObject, limits: RequestLimits) -> None:
    size = limits.vocab_size
    most = size if limits.max_logprobs == -1 else min(size, limits.max_logprobs)
    # -1 means the whole vocabulary.
    lowest = -1 if most == size else 0
    for name in LOGPROBS_FIELDS:
        value = fields.get(name)
        if _is_int(value) and not lowest <= value <= most:
            raise _invalid(name, f"be {lowest} to {most} on this server (--max-logprobs)", value)


def _check_words(name: str, value: Any) -> None:
    if value == "":
        raise InvalidValueError(f"'{name}' must not be empty.", param=name)
    for index, word in enumerate(value if isinstance(value, list) else ()):
        if word == "":
            path = f"{name}[{index}]"
            raise InvalidValueError(f"'{path}' must not be empty.", param=path)


def _check_repetition(value: Any) -> None:
    if not isinstance(value, dict):
        return
    sizes = [value.get(name, 0) for name in ("max_pattern_size", "min_pattern_size", "min_count")]
    if not all(map(_is_int, sizes)):
        return
    largest, smallest, count = sizes
    if largest < 0:
        raise _invalid(f"{_REPETITION}.max_pattern_size", "be at least 0", largest)
    if not 0 <= smallest <= largest:
        allowed = f"be 0 to 'max_pattern_size', {largest}"
        raise _invalid(f"{_REPETITION}.min_pattern_size", allowed, smallest)
    if largest > 0 and count < 2:
        raise _invalid(f"{_REPETITION}.min_count", "be at least 2", count)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _invalid(path: str, allowed: str, given: object) -> InvalidValueError:
    return InvalidValueError(f"'{path}' must {allowed}, got {describe(given)}.", param=path)
