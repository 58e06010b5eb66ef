"""Drafts from the request's own text: the tokens after an earlier occurrence of its last n."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rbln_backend.speculation.drafter import DraftedRequest
from rbln_backend.speculation.text_index import MAX_TEXT_TOKENS, TextIndex

_CANDIDATES = 16
"""Most earlier positions compared: bounds the cost of a text that repeats one token."""


@dataclass(frozen=True, slots=True)
class NgramLimits:
    """Lengths of n-grams, vLLM's ``prompt_lookup_min`` and ``prompt_lookup_max``.

    Raises ``ValueError`` for an empty range.
    """

    smallest: int
    largest: int

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.largest:
            raise ValueError(f"n-grams of {self.smallest} to {self.largest} tokens: there are none")


class NgramDrafter:
    """A ``Drafter`` that continues from the latest of the longest matches."""

    def __init__(self, limits: NgramLimits) -> None:
        self._limits = limits
        self._texts: dict[str, TextIndex] = {}
        self._tails: dict[str, list[int]] = {}

    def begin(self, request: DraftedRequest) -> None:
        """See ``Drafter``."""
        text = TextIndex(self._limits.smallest, MAX_TEXT_TOKENS)
        self._texts[request.request_id] = text
        self._tails[request.request_id] = []
        self.extend(request.request_id, request.prompt)

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """See ``Drafter``."""
        most = self._limits.largest
        self._texts[request_id].extend(tokens)
        self._tails[request_id] = [*self._tails[request_id], *tokens[-most:]][-most:]

    def propose(self, request_id: str, limit: int) -> list[int]:
        """See ``Drafter``."""
        text, tail = self._texts[request_id], self._tails[request_id]
        longest, best = 0, None
        for position in text.positions(text.key, _CANDIDATES):
            length = text.match(position, tail)
            if length > longest:
                longest, best = length, position
            if length == len(tail):
                break
        return [] if best is None else text.continuation(best, limit)

    def end(self, request_id: str, finished: bool) -> None:  # noqa: ARG002 (nothing outlives it)
        """See ``Drafter``."""
        del self._texts[request_id], self._tails[request_id]
