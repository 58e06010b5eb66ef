"""Drafts from finished answers and the request's own text: the most frequent continuation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from rbln_backend.speculation.drafter import DraftedRequest
from rbln_backend.speculation.past_answers import Owner, PastAnswers
from rbln_backend.speculation.text_index import GAP, MAX_TEXT_TOKENS, TextIndex

_GRAM = 2
_CANDIDATES = 8
"""Most positions of a text that are compared, and most matches that are followed at once."""
_LONG = 8
"""A match of this length ends the search for others."""
MAX_TOKENS = 1 << 18
"""Of finished answers in memory; a token takes about 200 bytes."""


@dataclass(frozen=True, slots=True)
class SuffixLimits:
    """vLLM's settings ``suffix_decoding_*``, with the meaning that vLLM documents.

    ``max_tree_depth`` bounds the tokens compared and drafted together, ``max_cached_requests`` the
    finished answers of each owner. A match of n tokens drafts at most ``max_spec_factor`` times n
    tokens, while the share of matches that agree is at least ``min_token_prob``. Raises
    ``ValueError`` for values out of range.
    """

    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    max_tokens: int = MAX_TOKENS

    def __post_init__(self) -> None:
        if self.max_tree_depth <= _GRAM:
            raise ValueError(f"a depth of {self.max_tree_depth} leaves nothing to draft")
        if self.max_cached_requests < 0 or self.max_spec_factor < 0 or self.max_tokens < 0:
            raise ValueError("numbers of answers, tokens and factors are not negative")
        if not 0 <= self.min_token_prob <= 1:
            raise ValueError(f"min_token_prob={self.min_token_prob} is no probability")


@dataclass(slots=True)
class _Match:
    """A position whose ``length`` preceding tokens are the request's latest ones."""

    text: TextIndex
    position: int
    length: int


_length = attrgetter("length")


class _RequestText:
    """The text of one request, its answer, and the matches of its end, longest first."""

    def __init__(self, owner: Owner, prompt: Sequence[int], depth: int) -> None:
        self.owner = owner
        self.own = TextIndex(_GRAM, MAX_TEXT_TOKENS)
        self.own.extend(prompt)
        self.answer: list[int] = []
        self.matches: list[_Match] = []
        self._depth = depth
        self._tail = list(prompt[-depth:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, and drop the matches that continue otherwise."""
        for token in tokens:
            self.matches = [m for m in self.matches if m.text.at(m.position) == token]
            for match in self.matches:
                match.position += 1
                match.length = min(match.length + 1, self._depth)
            self.own.extend((token,))
        self.answer += tokens
        self._tail = [*self._tail, *tokens][-self._depth :]

    def search(self, texts: Sequence[TextIndex]) -> None:
        """Add the longest, latest matches in ``texts``, unless there is one of ``_LONG`` tokens."""
        if self.matches and self.matches[0].length >= _LONG:
            return
        known = {(id(match.text), match.position) for match in self.matches}
        found = [
            (text.match(position, self._tail), text, position)
            for text in texts
            for position in text.positions(self.own.key, _CANDIDATES)
            if not known or (id(text), position) not in known
        ]
        longest = max((length for length, _, _ in found), default=0)
        if self.matches and longest < self.matches[0].length:
            return
        self.matches += [
            _Match(text, at, length) for length, text, at in found if length == longest
        ]
        self.matches.sort(key=_length, reverse=True)
        del self.matches[_CANDIDATES:]


class SuffixDrafter:
    """A ``Drafter`` over finished answers, separate by adapter and API key.

    Matches are followed from token to token: a long match stays, however many later positions
    match two tokens. The longest matches vote on the tokens of a draft.
    """

    def __init__(self, limits: SuffixLimits) -> None:
        self._limits = limits
        self._answers = PastAnswers(_GRAM, limits.max_cached_requests, limits.max_tokens)
        self._requests: dict[str, _RequestText] = {}

    def begin(self, request: DraftedRequest) -> None:
        """See ``Drafter``."""
        owner = Owner(request.adapter, request.key)
        self._requests[request.request_id] = _RequestText(
            owner, request.prompt, self._limits.max_tree_depth
        )

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """See ``Drafter``."""
        self._requests[request_id].extend(tokens)

    def propose(self, request_id: str, limit: int) -> list[int]:
        """See ``Drafter``."""
        request = self._requests[request_id]
        past = self._answers.of(request.owner)
        request.search([request.own] if past is None else [request.own, past])
        if not request.matches:
            return []
        limits = self._limits
        longest = min(request.matches[0].length, max(limits.max_tree_depth - limit, _GRAM))
        best = [match for match in request.matches if match.length >= longest]
        most = min(limit, limits.max_tree_depth - longest, int(limits.max_spec_factor * longest))
        drafts = [match.text.continuation(match.position, most) for match in best]
        return _majority(drafts, limits, most)

    def end(self, request_id: str, finished: bool) -> None:
        """See ``Drafter``."""
        request = self._requests.pop(request_id)
        if finished:
            self._answers.add(request.owner, request.answer)


def _majority(drafts: list[list[int]], limits: SuffixLimits, most: int) -> list[int]:
    """Return at most ``most`` tokens, each the most frequent one; the first wins a tie."""
    if drafts.count(drafts[0]) == len(drafts):
        return drafts[0]
    voters, chosen = len(drafts), list[int]()
    while len(chosen) < most:
        following = [draft[len(chosen)] if len(chosen) < len(draft) else GAP for draft in drafts]
        token = max(following, key=following.count)
        drafts = [draft for draft, voted in zip(drafts, following, strict=True) if voted == token]
        if token == GAP or len(drafts) < limits.min_token_prob * voters:
            break
        chosen.append(token)
    return chosen
