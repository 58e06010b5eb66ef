"""Encode prompts in which some occurrences of control tokens are text."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from tokenizers import AddedToken, Encoding, Tokenizer

from server.vllm.rendering.control_tokens import NONCHARACTERS, SpelledPrompt, is_control, one_of


class PlainTextEncoder:
    """A tokenizer that knows another one's control tokens by aliases alone.

    An alias is as long as its token and begins with a noncharacter, which no prompt has. The
    control tokens of the template are replaced by their aliases, and the rest of the prompt is
    encoded as by a tokenizer without control tokens, in one piece: merges at the seams, offsets and
    the spaces that added tokens take in are those of that tokenizer.
    """

    def __init__(self, backend: Tokenizer, added: Mapping[int, AddedToken]) -> None:
        """Share the model of `backend`; `added` are its added tokens by id."""
        self._plain = Tokenizer(backend.model)
        self._plain.normalizer = backend.normalizer
        self._plain.pre_tokenizer = backend.pre_tokenizer
        self._plain.post_processor = backend.post_processor
        self._aliases: dict[str, str] = {}
        self._ids: dict[int, int] = {}
        endings = Counter[str]()
        for number, token in added.items():
            text, ending = token.content, token.content[1:]
            if is_control(text) and endings[ending] < len(NONCHARACTERS):
                self._aliases[text] = text = chr(NONCHARACTERS[endings[ending]]) + ending
                endings[ending] += 1
            flags = ("lstrip", "rstrip", "single_word", "normalized")
            copied = AddedToken(text, **{name: getattr(token, name) for name in flags})
            self._plain.add_tokens([copied])
            if (own_id := self._plain.token_to_id(text)) is not None:
                self._ids[own_id] = number
        # Pieces of the model's own vocabulary, which some models make of such a text.
        self._control = frozenset(map(self._plain.token_to_id, self._aliases))
        self._found = re.compile(one_of(self._aliases))

    def encode(
        self, prompt: SpelledPrompt, max_length: int | None, side: str, *, adds_special: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids, at most `max_length`, and the offsets of their characters.

        `side` is the end at which a longer prompt is cut.
        """
        marks = prompt.marks

        def alias(found: re.Match[str]) -> str:
            index = bisect_right(marks, found.start())
            is_text = index < len(marks) and marks[index] < found.end()
            return found[0] if is_text else self._aliases[found[0]]

        text = self._found.sub(alias, str(prompt))
        encoding = self._plain.encode(text, add_special_tokens=False)
        if not self._control.isdisjoint(encoding.ids):
            cuts = pairwise((0, *marks, len(text)))
            parts = [self._plain.encode(text[a:b], add_special_tokens=False) for a, b in cuts]
            encoding = Encoding.merge(parts, growing_offsets=True)
        if max_length is not None:
            around = self._plain.num_special_tokens_to_add(is_pair=False) if adds_special else 0
            encoding.truncate(max(max_length - around, 0), direction=side)
        if adds_special:
            encoding = self._plain.post_process(encoding)
        return [self._ids.get(number, number) for number in encoding.ids], encoding.offsets
