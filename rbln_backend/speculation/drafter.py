"""The interface of drafters, which guess a request's next tokens from texts already seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

EXTRA_ARGS = "speculation"
"""The key of a request's draft settings in its sampling parameters' ``extra_args``."""


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Draft settings of a request, and their defaults."""

    off: bool = False
    prediction: tuple[int, ...] = ()
    """Token ids of the text that the client expects."""
    key: str | None = None
    """The name of the API key, None without one. Answers of one key are no drafts for others."""

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> DraftSettings:
        """Read ``{"off": bool, "prediction": [token ids], "key": str | None}``, all optional.

        Anything but a mapping counts as absent: clients of vLLM's own server can write it.
        """
        given = (extra_args or {}).get(EXTRA_ARGS)
        if not isinstance(given, Mapping):
            return cls()
        off, prediction = bool(given.get("off", False)), tuple(given.get("prediction", ()))
        return cls(off, prediction, given.get("key"))


@dataclass(frozen=True, slots=True)
class DraftedRequest:
    """A request as drafters see it."""

    request_id: str
    prompt: Sequence[int]
    """Token ids."""
    prediction: Sequence[int] = ()
    """Token ids of the text that the client expects."""
    adapter: str | None = None
    key: str | None = None
    """See ``DraftSettings.key``."""


class Drafter(Protocol):
    """Proposes drafts from texts it has seen; deterministic: equal calls give equal drafts.

    Raises ``KeyError`` for ids without ``begin``.
    """

    def begin(self, request: DraftedRequest) -> None:
        """Add a request whose prompt has been computed."""
        ...

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """Append sampled tokens, drafted or not."""
        ...

    def propose(self, request_id: str, limit: int) -> list[int]:
        """Return at most ``limit`` tokens that may come next; none without a match."""
        ...

    def end(self, request_id: str, finished: bool) -> None:
        """Remove a request; not ``finished``: it was aborted, and its answer is incomplete."""
        ...
