"""Drafts from finished answers and the request's own text: what most often followed its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from rbln_backend.speculation.drafter import NO_DRAFT, Draft, DraftedRequest
from rbln_backend.speculation.past_answers import Owner, PastAnswers
from rbln_backend.speculation.text_index import GAP, ROOM, TextIndex

_GRAM = 2
_CANDIDATES = 8
"""Places of each text that are compared, and places that are followed at once."""
_LONG = 8
"""Tokens in common from which on no other places are looked for."""
MAX_TOKENS = 1 << 18
"""Of finished answers in memory; some 200 bytes each."""


@dataclass(frozen=True, slots=True)
class SuffixLimits:
    """vLLM's settings of the same names behind ``suffix_decoding_``, read as its documentation has
    them; ``shared``: answers to one API key are drafts for every other.

    ``max_tree_depth`` bounds the tokens compared and drafted together, ``max_cached_requests`` the
    finished answers of each owner. A match of n tokens drafts at most ``max_spec_factor`` times n,
    and as far as the share of the places that agree is at least ``min_token_prob``. Raises
    ``ValueError`` where one is out of range.
    """

    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    max_tokens: int = MAX_TOKENS
    shared: bool = False

    def __post_init__(self) -> None:
        if self.max_tree_depth <= _GRAM:
            raise ValueError(f"a depth of {self.max_tree_depth} leaves nothing to draft")
        if self.max_cached_requests < 0 or self.max_spec_factor < 0 or self.max_tokens < 0:
            raise ValueError("numbers of answers, tokens and factors are not negative")
        if not 0 <= self.min_token_prob <= 1:
            raise ValueError(f"min_token_prob={self.min_token_prob} is no probability")


@dataclass(slots=True)
class _Place:
    """Where a text has gone on like the request, for ``length`` tokens so far."""

    text: TextIndex
    at: int
    length: int


_length = attrgetter("length")


class _Followed:
    """One request: its own text, its answer, and the places that have gone on like it."""

    def __init__(self, owner: Owner, prompt: Sequence[int], depth: int) -> None:
        self.owner = owner
        self.own = TextIndex(_GRAM, ROOM)
        self.own.extend(prompt)
        self.answer: list[int] = []
        self.places: list[_Place] = []
        self._depth = depth
        self._tail = list(prompt[-depth:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Drop the places that went on otherwise."""
        for token in tokens:
            self.places = [place for place in self.places if place.text.at(place.at) == token]
            for place in self.places:
                place.at += 1
                place.length = min(place.length + 1, self._depth)
            self.own.extend((token,))
        self.answer += tokens
        self._tail = [*self._tail, *tokens][-self._depth :]

    def look(self, texts: Sequence[TextIndex]) -> None:
        """Add the latest places that end as the request does, unless one has for long."""
        if self.places and self.places[0].length >= _LONG:
            return
        known = {(id(place.text), place.at) for place in self.places}
        found = [
            (text.match(at, self._tail), text, at)
            for text in texts
            for at in text.places(self.own.key, _CANDIDATES)
            if not known or (id(text), at) not in known
        ]
        longest = max((length for length, _, _ in found), default=0)
        if self.places and longest < self.places[0].length:
            return
        self.places += [_Place(text, at, length) for length, text, at in found if length == longest]
        self.places.sort(key=_length, reverse=True)
        del self.places[_CANDIDATES:]


class SuffixDrafter:
    """A ``Drafter`` with a memory of finished answers, of each adapter and API key apart.

    Places that have gone on like the request are followed from token to token, so that a long
    match is kept however many later places end in the same two tokens. What they say next is put
    to the vote among those with the longest match.
    """

    def __init__(self, limits: SuffixLimits) -> None:
        self._limits = limits
        self._answers = PastAnswers(_GRAM, limits.max_cached_requests, limits.max_tokens)
        self._requests: dict[str, _Followed] = {}

    def begin(self, request: DraftedRequest) -> None:
        """See ``Drafter``."""
        owner = Owner(request.adapter, None if self._limits.shared else request.key)
        self._requests[request.request_id] = _Followed(
            owner, request.prompt, self._limits.max_tree_depth
        )

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """See ``Drafter``."""
        self._requests[request_id].extend(tokens)

    def propose(self, request_id: str, limit: int) -> Draft:
        """See ``Drafter``."""
        request = self._requests[request_id]
        past = self._answers.of(request.owner)
        request.look([request.own] if past is None else [request.own, past])
        if not request.places:
            return NO_DRAFT
        limits, agreed = self._limits, request.places[0].length
        longest = min(agreed, max(limits.max_tree_depth - limit, _GRAM))
        best = [place for place in request.places if place.length >= longest]
        room = min(limit, limits.max_tree_depth - longest, int(limits.max_spec_factor * longest))
        drafts = [place.text.continuation(place.at, room) for place in best]
        return Draft(_voted(drafts, limits, room), agreed)

    def end(self, request_id: str, finished: bool) -> None:
        """See ``Drafter``."""
        request = self._requests.pop(request_id)
        if finished:
            self._answers.add(request.owner, request.answer)


def _voted(drafts: list[list[int]], limits: SuffixLimits, room: int) -> list[int]:
    """Return what most of the drafts agree on, token by token; the first wins a tie."""
    if drafts.count(drafts[0]) == len(drafts):
        return drafts[0]
    voters, chosen = len(drafts), list[int]()
    while len(chosen) < room:
        following = [draft[len(chosen)] if len(chosen) < len(draft) else GAP for draft in drafts]
        token = max(following, key=following.count)
        drafts = [draft for draft, said in zip(drafts, following, strict=True) if said == token]
        if token == GAP or len(drafts) < limits.min_token_prob * voters:
            break
        chosen.append(token)
    return chosen
