"""Drafts from texts: the request's own (n-gram) and finished answers (suffix).

N-gram: the tokens after an earlier occurrence of the last n. Suffix: the most frequent continuation
in finished answers, which are separate by owner and bounded in memory, and in the own text.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from rbln_backend.speculation.drafter import DraftedRequest, Drafter

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

MAX_TEXT_TOKENS = 1 << 20
"""Latest tokens of one request that are searched."""
GAP = -1
"""Separator of two texts, equal to no token: no match or continuation crosses it."""
_TOKEN_BITS = 32


class TextIndex:
    """The last ``capacity`` tokens appended, with an index of the positions after each n-gram.

    A position is the number of tokens appended before it, and never changes. Positions after equal
    n-grams of ``gram`` tokens are chained from the latest back, as in LZ77 coders: the cost of
    appending and of following a chain does not depend on the length of the text.
    """

    def __init__(self, gram: int, capacity: int) -> None:
        """Raises ``ValueError`` for less than one token of either."""
        if gram < 1 or capacity < gram:
            raise ValueError(f"a text of {capacity} tokens cannot be found by {gram}")
        self.gram = gram
        self.start = 0
        """First position that is searched; the owner may move it forward."""
        self._capacity = capacity
        self._mask = (1 << gram * _TOKEN_BITS) - 1
        self._key = 0
        self._end = 0
        self._since_gap = 0
        """Tokens since the last gap."""
        self._tokens: list[int] = []
        self._keys: list[int | None] = []
        self._before = array("q")
        self._latest: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of tokens ever appended: the position after the last."""
        return self._end

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def key(self) -> int | None:
        """The key of the last ``gram`` tokens for ``positions``; None where there are too few."""
        return self._key if self._since_gap >= self.gram else None

    def extend(self, tokens: Iterable[int]) -> None:
        key, since_gap, end, capacity = self._key, self._since_gap, self._end, self._capacity
        for token in tokens:
            slot = end % capacity
            if end >= capacity:
                # Remove the oldest position from its chain, so that its slot can be reused.
                oldest, oldest_key = end - capacity + 1, self._keys[slot]
                self.start = max(self.start, oldest)
                if oldest_key is not None and self._latest[oldest_key] == oldest:
                    del self._latest[oldest_key]
            end += 1
            since_gap = 0 if token == GAP else since_gap + 1
            key = (key << _TOKEN_BITS | token + 1) & self._mask
            indexed = key if since_gap >= self.gram else None
            before = self._latest.get(key, -1) if indexed is not None else -1
            if end > capacity:
                self._tokens[slot], self._keys[slot], self._before[slot] = token, indexed, before
            else:
                self._tokens.append(token)
                self._keys.append(indexed)
                self._before.append(before)
            if indexed is not None:
                self._latest[key] = end
        self._key, self._since_gap, self._end = key, since_gap, end

    def at(self, position: int) -> int:
        """Return the token at ``position``, ``GAP`` outside the text in memory."""
        if self.start <= position < self._end:
            return self._tokens[position % self._capacity]
        return GAP

    def positions(self, key: int | None, most: int) -> list[int]:
        """Return at most ``most`` positions of ``key`` before the end, the latest first."""
        found: list[int] = []
        if key is None:
            return found
        oldest, before, capacity = self.start + self.gram, self._before, self._capacity
        position = self._latest.get(key, -1)
        if position == self._end:
            position = before[(position - 1) % capacity]
        while position >= oldest and len(found) < most:
            found.append(position)
            position = before[(position - 1) % capacity]
        return found

    def match(self, position: int, tail: Sequence[int]) -> int:
        """Return how many tokens before ``position``, one of ``positions``, end ``tail``."""
        tokens, capacity = self._tokens, self._capacity
        length, most = self.gram, min(len(tail), position - self.start)
        while length < most and tokens[(position - 1 - length) % capacity] == tail[-1 - length]:
            length += 1
        return length

    def continuation(self, position: int, limit: int) -> list[int]:
        """Return at most ``limit`` tokens from ``position`` on.

        At its end the text is assumed to repeat itself from ``position``.
        """
        if not self.start <= position < self._end:
            return []
        slot = position % self._capacity
        end = slot + min(limit, self._end - position)
        found = self._tokens[slot:end]
        if end > self._capacity:
            found = found + self._tokens[: end - self._capacity]
        if GAP in found:
            return found[: found.index(GAP)]
        return (found * limit)[:limit] if len(found) < limit else found


_MAX_OWNERS = 256


@dataclass(frozen=True, slots=True)
class Owner:
    """The adapter and API key of answers, which are never drafts for another owner."""

    adapter: str | None
    key: str | None


class _OwnedAnswers:
    """The answers of one owner."""

    def __init__(self, gram: int, capacity: int) -> None:
        self.text = TextIndex(gram, capacity)
        self._starts: deque[int] = deque()

    def add(self, answer: Sequence[int], most: int) -> int:
        """Add an answer, evict the oldest beyond ``most``; return the growth in tokens."""
        before = self.text.num_tokens
        self._starts.append(len(self.text))
        self.text.extend((GAP, *answer, GAP))
        while len(self._starts) > most:
            self._starts.popleft()
            self.text.start = max(self.text.start, self._starts[0])
        return self.text.num_tokens - before


class PastAnswers:
    """Finished answers: at most ``max_answers`` of an owner, ``max_tokens`` in all.

    At most ``_MAX_OWNERS`` owners have answers; the least recently used one is evicted first. One
    owner may hold a quarter of the tokens, so that its answers do not evict all others.
    """

    def __init__(self, gram: int, max_answers: int, max_tokens: int) -> None:
        self._gram, self._max_answers, self._max_tokens = gram, max_answers, max_tokens
        self._by_owner: OrderedDict[Owner, _OwnedAnswers] = OrderedDict()
        self.num_tokens = 0
        """Tokens in memory."""

    def of(self, owner: Owner) -> TextIndex | None:
        """Return the owner's answers, None without any."""
        answers = self._by_owner.get(owner)
        if answers is None:
            return None
        self._by_owner.move_to_end(owner)
        return answers.text

    def add(self, owner: Owner, answer: Sequence[int]) -> None:
        """Add a finished answer, or the end of one that is longer than an owner's share."""
        capacity = self._max_tokens // 4
        if self._max_answers == 0 or len(answer) <= self._gram or capacity <= self._gram:
            return
        if owner not in self._by_owner:
            self._by_owner[owner] = _OwnedAnswers(self._gram, capacity)
        answers = self._by_owner[owner]
        self._by_owner.move_to_end(owner)
        self.num_tokens += answers.add(answer[-capacity:], self._max_answers)
        while self.num_tokens > self._max_tokens or len(self._by_owner) > _MAX_OWNERS:
            _, oldest = self._by_owner.popitem(last=False)
            self.num_tokens -= oldest.text.num_tokens


_NGRAM_CANDIDATES = 16
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
        text = TextIndex(self._limits.smallest, MAX_TEXT_TOKENS)
        self._texts[request.request_id] = text
        self._tails[request.request_id] = []
        self.extend(request.request_id, request.prompt)

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        most = self._limits.largest
        self._texts[request_id].extend(tokens)
        self._tails[request_id] = [*self._tails[request_id], *tokens[-most:]][-most:]

    def propose(self, request_id: str, limit: int) -> list[int]:
        text, tail = self._texts[request_id], self._tails[request_id]
        longest, best = 0, None
        for position in text.positions(text.key, _NGRAM_CANDIDATES):
            length = text.match(position, tail)
            if length > longest:
                longest, best = length, position
            if length == len(tail):
                break
        return [] if best is None else text.continuation(best, limit)

    def end(self, request_id: str, finished: bool) -> None:  # noqa: ARG002 (nothing outlives it)
        del self._texts[request_id], self._tails[request_id]


_GRAM = 2
_SUFFIX_CANDIDATES = 8
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
            for position in text.positions(self.own.key, _SUFFIX_CANDIDATES)
            if not known or (id(text), position) not in known
        ]
        longest = max((length for length, _, _ in found), default=0)
        if self.matches and longest < self.matches[0].length:
            return
        self.matches += [
            _Match(text, at, length) for length, text, at in found if length == longest
        ]
        self.matches.sort(key=_length, reverse=True)
        del self.matches[_SUFFIX_CANDIDATES:]


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
        owner = Owner(request.adapter, request.key)
        self._requests[request.request_id] = _RequestText(
            owner, request.prompt, self._limits.max_tree_depth
        )

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        self._requests[request_id].extend(tokens)

    def propose(self, request_id: str, limit: int) -> list[int]:
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


DRAFT_METHODS = ("ngram", "suffix")
"""vLLM's names of the methods that need no draft model."""
DRAFT_MODELS = ("medusa", "eagle", "eagle3", "mtp")
"""vLLM's names of the methods with a draft model."""


def get_draft_model(config: VllmConfig) -> SpeculativeConfig | None:
    """Return the speculation by one of ``DRAFT_MODELS``, None without a draft model."""
    speculation = config.speculative_config
    return speculation if speculation is not None and speculation.method in DRAFT_MODELS else None


def make_drafter(config: SpeculativeConfig) -> Drafter:
    """Return a drafter of one of ``DRAFT_METHODS``."""
    if config.method == "suffix":
        limits = SuffixLimits(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
        )
        return SuffixDrafter(limits)
    smallest, largest = config.prompt_lookup_min, config.prompt_lookup_max
    assert smallest is not None and largest is not None
    return NgramDrafter(NgramLimits(smallest, largest))
