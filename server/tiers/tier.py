"""Service tiers: classes of the engine's scheduler, by the names that clients have for them."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from rbln_backend.config import BACKGROUND_PRIORITY, FIRST_PRIORITY
from server.errors import InvalidValueError, PermissionDeniedError, describe
from server.wire.endpoint import Endpoint, JsonObject

FIELD = "service_tier"
AUTO = "auto"
_STANDARD = "standard_only"
OPENAI_WORDS = (AUTO, "default", "flex", "priority")
ANTHROPIC_WORDS = (AUTO, _STANDARD)


class Tier(enum.Enum):
    """One class; the value is OpenAI's name of it."""

    DEFAULT = "default"
    """In the order in which requests come."""
    FLEX = "flex"
    """What others leave: rows that would be padding, and steps without work."""
    PRIORITY = "priority"
    """Admitted before all others that wait."""

    @property
    def anthropic(self) -> str:
        """Anthropic's name of it."""
        return {"default": "standard", "flex": "batch", "priority": "priority"}[self.value]

    @property
    def engine_priority(self) -> int | None:
        """The engine's priority of its requests, None where that is the request's own."""
        return _PRIORITIES.get(self)


_PRIORITIES = {Tier.FLEX: BACKGROUND_PRIORITY, Tier.PRIORITY: FIRST_PRIORITY}

Tiers = Sequence[Tier]
"""What somebody may use; the first is what he gets without a word, and for `auto`."""
EVERY_TIER: Tiers = tuple(Tier)


def tiers_of(text: str) -> Tiers:
    """Return the tiers of `flex`, `priority+default` and their like. Raises `ValueError`."""
    return tuple(dict.fromkeys(Tier(word) for word in text.split("+")))


def take_tier(endpoint: Endpoint, body: JsonObject) -> str | None:
    """Take off `body` the tier that it asks for, by OpenAI's name. Raises `InvalidValueError`."""
    asked = body.pop(FIELD, None)
    words = ANTHROPIC_WORDS if endpoint.anthropic else OPENAI_WORDS
    if asked is None:
        return None
    if asked not in words:
        known = ", ".join(repr(word) for word in words)
        raise InvalidValueError(
            f"'{FIELD}' must be one of {known}, got {describe(asked)}.", param=FIELD
        )
    return Tier.DEFAULT.value if asked == _STANDARD else str(asked)


def granted(asked: str | None, allowed: Tiers) -> Tier:
    """Return the tier that a request gets. Raises `PermissionDeniedError` for one it may not."""
    if asked in (None, AUTO):
        return allowed[0]
    tier = Tier(asked)
    if tier not in allowed:
        may = " or ".join(repr(one.value) for one in allowed)
        raise PermissionDeniedError(
            f"'{FIELD}' may be {may} for whoever asks here, got {tier.value!r}.", param=FIELD
        )
    return tier
