"""Checks of the field and the headers that schedule a request: priority, tier and rank."""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from rbln_backend.api.requests import BACKGROUND_PRIORITY
from server.errors import InvalidValueError, UnsupportedFieldError, describe
from server.request.options.tier import Tier
from server.wire.endpoint import JsonObject

PRIORITY_HEADER = "X-Vllm-Priority"
RANK_HEADER = "X-data-parallel-rank"
_RANK = re.compile("[0-9]{1,6}")
_PRIORITY = re.compile("[+-]?[0-9]{1,12}")
_MAX_PRIORITY = BACKGROUND_PRIORITY - 1
"""Higher values are those of the service tiers `flex` and `priority`."""


def check_priority_header(headers: Headers, *, has_priorities: bool) -> None:
    """Raise the `RequestError` of an invalid priority header, which vLLM would accept or ignore."""
    given = headers.get(PRIORITY_HEADER)
    if given is None:
        return
    if not _PRIORITY.fullmatch(given):
        raise InvalidValueError(
            f"The header {PRIORITY_HEADER} must be an integer of at most 12 digits, got "
            f"{describe(given)}.",
            param=PRIORITY_HEADER,
        )
    check_priority(int(given), PRIORITY_HEADER, has_priorities=has_priorities)


def check_tier(fields: JsonObject, headers: Headers, tier: Tier | None) -> None:
    """Raise `UnsupportedFieldError` for a priority in a tier that sets the priority."""
    if tier is None or tier.engine_priority is None:
        return
    for name, value in (
        ("priority", fields.get("priority")),
        (PRIORITY_HEADER, headers.get(PRIORITY_HEADER)),
    ):
        if value not in (None, 0, "0"):
            raise UnsupportedFieldError(
                f"'{name}' has no effect in the service tier {tier.value!r}.", param=name
            )


def check_rank_header(headers: Headers, num_ranks: int) -> None:
    """Raise `InvalidValueError` for a header that is not a data-parallel rank."""
    given = headers.get(RANK_HEADER)
    if given is None:
        return
    if not _RANK.fullmatch(given) or int(given) >= num_ranks:
        raise InvalidValueError(
            f"The header {RANK_HEADER} must be a data-parallel rank of this server, 0 to "
            f"{num_ranks - 1}, got {describe(given)}.",
            param=RANK_HEADER,
        )


def check_priority(value: object, name: str, *, has_priorities: bool) -> None:
    """Raise the `RequestError` of a priority that has no effect, or is not a small integer."""
    if not isinstance(value, int) or not value:
        return
    if not has_priorities:
        raise UnsupportedFieldError(
            f"'{name}' has no effect: this server was not started with "
            "--scheduling-policy priority.",
            param=name,
        )
    if abs(value) > _MAX_PRIORITY:
        raise InvalidValueError(
            f"'{name}' must be -{_MAX_PRIORITY} to {_MAX_PRIORITY}, got {describe(value)}.",
            param=name,
        )
