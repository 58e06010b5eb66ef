"""The account that a request's device time is charged to, as the server passes it to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

ACCOUNT_ARGS = "account"
"""Name of the account among a request's ``extra_args`` (sampling) or ``extra_kwargs`` (pooling)."""

REQUEST, INTERNAL = "request", "internal"
WARMUP, PADDING = "warmup", "padding"
ACCOUNT_KINDS = (REQUEST, INTERNAL, WARMUP, PADDING)
"""Kinds of work: clients' requests, other requests of the server such as its self-test, the start,
and steps without any request."""


class RequestAccount(NamedTuple):
    """Kind of the work, and the name of its API key; empty for requests without a key."""

    kind: str = REQUEST
    key: str = ""

    def as_args(self) -> dict[str, Any]:
        """Return the form that ``of`` reads."""
        return {ACCOUNT_ARGS: [self.kind, self.key]}

    @classmethod
    def of(cls, args: Mapping[str, Any] | None) -> RequestAccount:
        """Return the account in ``args``; that of requests without a key if it is absent."""
        match (args or {}).get(ACCOUNT_ARGS):
            case [str(kind), str(key)] if kind in ACCOUNT_KINDS:
                return cls(kind, key)
        return cls()
