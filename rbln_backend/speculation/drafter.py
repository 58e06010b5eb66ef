"""What makes drafts: guesses at a request's next tokens, from texts that are known already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

EXTRA_ARGS = "speculation"
"""Under this name a request's wishes travel in its sampling parameters' ``extra_args``."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request says of drafts; the default is that of one which says nothing."""

    off: bool = False
    prediction: tuple[int, ...] = ()
    """Token ids of the text that the client expects."""
    key: str | None = None
    """Whose request it is: texts of one are no drafts for another; None: of nobody in particular.
    """

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> Wishes:
        """Read ``{"off": bool, "prediction": [token ids], "key": str | None}``, any part absent.

        Anything but a mapping counts as absent: through vLLM's own server clients write it.
        """
        told = (extra_args or {}).get(EXTRA_ARGS)
        if not isinstance(told, Mapping):
            return cls()
        return cls(bool(told.get("off", False)), tuple(told.get("prediction", ())), told.get("key"))


@dataclass(frozen=True, slots=True)
class DraftedRequest:
    """What a drafter is told of a request."""

    request_id: str
    prompt: Sequence[int]
    """Token ids."""
    prediction: Sequence[int] = ()
    """Token ids of the text that the client expects."""
    adapter: str | None = None
    key: str | None = None
    """See ``Wishes.key``."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next."""

    tokens: list[int]
    agreed: int
    """How many tokens speak for the first: those before it that were as the text has them that it
    is read from."""


NO_DRAFT = Draft([], 0)


class Drafter(Protocol):
    """Guesses from what it has seen, and from nothing else: the same calls give the same drafts.

    Every rank of an engine has its own and calls it alike. Ids that were not begun are an error.
    """

    def begin(self, request: DraftedRequest) -> None:
        """A request's prompt has been computed."""
        ...

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """Tokens were sampled, drafted or not."""
        ...

    def propose(self, request_id: str, limit: int) -> Draft:
        """At most ``limit`` tokens; none where nothing is to be guessed."""
        ...

    def end(self, request_id: str, finished: bool) -> None:
        """The request is gone; not ``finished``: it was aborted, and its text is a part."""
        ...
