"""Service tiers: priority classes of the engine's scheduler, by OpenAI's and Anthropic's names."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from rbln_backend.api.requests import BACKGROUND_PRIORITY, FIRST_PRIORITY
from server.errors import InvalidValueError, PermissionDeniedError, describe
from server.request.fields.shared import ANTHROPIC_TIERS, OPENAI_TIERS
from server.wire.endpoint import Endpoint, JsonObject

FIELD = "service_tier"
AUTO = "auto"
_STANDARD = "standard_only"


class Tier(enum.Enum):
    """Service tier; the value is OpenAI's name."""

    DEFAULT = "default"
    """Served in the order of `--prefill-policy`."""
    FLEX = "flex"
    """Served in rows that would be padding, and in idle steps."""
    PRIORITY = "priority"
    """Admitted before all other waiting requests."""

    @property
    def anthropic(self) -> str:
        """Anthropic's name of the tier."""
        return {"default": "standard", "flex": "batch", "priority": "priority"}[self.value]

    @property
    def engine_priority(self) -> int | None:
        """Scheduler priority; None to use the request's own."""
        return _PRIORITIES.get(self)


_PRIORITIES = {Tier.FLEX: BACKGROUND_PRIORITY, Tier.PRIORITY: FIRST_PRIORITY}

Tiers = Sequence[Tier]
"""Tiers that a key may use; the first is the default, and `auto`."""
EVERY_TIER: Tiers = tuple(Tier)


def tiers_of(text: str) -> Tiers:
    """Return the tiers of `flex`, `priority+default` and their like. Raises `ValueError`."""
    return tuple(dict.fromkeys(Tier(word) for word in text.split("+")))


def take_tier(endpoint: Endpoint, body: JsonObject) -> str | None:
    """Remove the tier from `body` and return OpenAI's name of it. Raises `InvalidValueError`."""
    requested = body.pop(FIELD, None)
    words = ANTHROPIC_TIERS if endpoint.anthropic else OPENAI_TIERS
    if requested is None:
        return None
    if requested not in words:
        known = ", ".join(repr(word) for word in words)
        raise InvalidValueError(
            f"'{FIELD}' must be one of {known}, got {describe(requested)}.", param=FIELD
        )
    return Tier.DEFAULT.value if requested == _STANDARD else str(requested)


def granted(requested: str | None, allowed: Tiers) -> Tier:
    """Return the tier of a request. Raises `PermissionDeniedError` for one that is not allowed."""
    if requested in (None, AUTO):
        return allowed[0]
    tier = Tier(requested)
    if tier not in allowed:
        names = ", ".join(repr(one.value) for one in allowed)
        raise PermissionDeniedError(
            f"{FIELD}: {tier.value!r} is not allowed for this API key; allowed: {names}.",
            param=FIELD,
        )
    return tier
