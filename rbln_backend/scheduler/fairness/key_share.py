"""The API key of a request and its weight, as the server passes them to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHARE_ARGS = "key_share"
"""Name of the share among a request's ``extra_args`` (sampling) or ``extra_kwargs`` (pooling)."""


@dataclass(frozen=True, slots=True)
class KeyShare:
    """Number of an API key, 0 for requests without a key, and the weight of its queue."""

    number: int = 0
    weight: float = 1.0

    def as_args(self) -> dict[str, Any]:
        """Return the form that ``of`` reads."""
        return {SHARE_ARGS: [self.number, self.weight]}

    @classmethod
    def of(cls, args: Mapping[str, Any] | None) -> KeyShare:
        """Return the share in ``args``; the one without a key if it is absent or malformed.

        Clients of vLLM's own server can write it.
        """
        match (args or {}).get(SHARE_ARGS):
            case [int(number), int() | float() as weight] if weight > 0:
                return cls(number, float(weight))
        return cls()
