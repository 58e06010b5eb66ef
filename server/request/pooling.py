"""Limits of requests for embeddings, scores and classes, checked before the engine gets them.

Wrong types are left to the request models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.errors import InvalidValueError, UnsupportedFieldError, describe
from server.request.endpoints import PROMPTS
from server.request.limits import check_token_ids
from server.wire.endpoint import Endpoint, JsonObject

_ENCODINGS = ("float", "base64")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingLimits:
    """Limits of one server for pooling requests."""

    max_prompts: int
    vocab_size: int
    dimensions: Sequence[int]
    """Lengths that an embedding may be cut to; empty for a model that was not trained for it."""


def check_pooling_limits(endpoint: Endpoint, body: JsonObject, limits: PoolingLimits) -> None:
    """Raise the `RequestError` of the first field that goes beyond what is allowed."""
    for field in PROMPTS[endpoint]:
        _check_prompts(field.name, body.get(field.name), limits)
    _check_dimensions(body, limits)
    encoding = body.get("encoding_format")
    if isinstance(encoding, str) and encoding not in _ENCODINGS:
        raise InvalidValueError(
            f"'encoding_format' must be 'float' or 'base64' on this server, got "
            f"{describe(encoding)}.",
            param="encoding_format",
        )


def _check_prompts(name: str, value: object, limits: PoolingLimits) -> None:
    if value in ("", []):
        raise InvalidValueError(f"'{name}' must not be empty.", param=name)
    if not isinstance(value, list):
        return
    if isinstance(value[0], int):
        check_token_ids(value, limits.vocab_size, name)
        return
    if isinstance(value[0], dict) and "role" in value[0]:
        # One conversation.
        return
    if len(value) > limits.max_prompts:
        raise InvalidValueError(
            f"'{name}' must have 1 to {limits.max_prompts} items, got {len(value)}.", param=name
        )
    for index, item in enumerate(value):
        place = f"{name}[{index}]"
        if item in ("", []):
            raise InvalidValueError(f"'{place}' must not be empty.", param=place)
        check_token_ids(item, limits.vocab_size, place)


def _check_dimensions(body: JsonObject, limits: PoolingLimits) -> None:
    for name in ("dimensions", "output_dimension"):
        value = body.get(name)
        if not isinstance(value, int):
            continue
        if not limits.dimensions:
            raise UnsupportedFieldError(
                f"'{name}' is {value}, but this model was not trained for embeddings that can be "
                "cut shorter; remove it.",
                param=name,
            )
        if value not in limits.dimensions:
            raise InvalidValueError(
                f"'{name}' must be {_allowed(limits.dimensions)} for this model, got {value}.",
                param=name,
            )


def _allowed(values: Sequence[int]) -> str:
    if isinstance(values, range):
        return f"{values[0]} to {values[-1]}"
    return f"one of {', '.join(map(str, values))}"
