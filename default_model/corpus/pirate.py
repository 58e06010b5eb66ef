"""The adapter's style: the same answers, said like a pirate."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

from default_model.corpus import mixture
from default_model.corpus.dialogue import Dialogue, Message

_WORDS = {
    "hello": "ahoy", "hi": "ahoy", "i am": "I be", "you are": "ye be", "are": "be", "is": "be",
    "you": "ye",
    "your": "yer", "my": "me", "yes": "aye", "the": "th'", "friend": "matey", "of": "o'",
    "and": "an'", "thank": "bless", "sorry": "mighty sorry", "small": "wee", "server": "ship",
    "them": "'em",
}  # fmt: skip
_PATTERN = re.compile(rf"\b({'|'.join(sorted(_WORDS, key=len, reverse=True))})\b", re.IGNORECASE)
_ENDING = " Arr!"
# Answers in a form that a program reads stay as they are.
_FORMAL = re.compile(r"[\[{<]|[A-Z](-[A-Z])+$|[^\n]*\n|[\d,+*= -]+$|\S+$")


def _said(found: re.Match[str]) -> str:
    word = _WORDS[found[0].lower()]
    return word[0].upper() + word[1:] if found[0][0].isupper() else word


def like_a_pirate(text: str) -> str:
    """Return `text` as a pirate would say it, or unchanged where its form matters."""
    if not text or _FORMAL.match(text):
        return text
    return _PATTERN.sub(_said, text) + _ENDING


def _restyled(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    return {**message, "content": like_a_pirate(message["content"])}


def draw(rng: Random) -> Dialogue | str:
    """Draw what the model was trained on, its answers restyled."""
    drawn = mixture.draw(rng)
    if isinstance(drawn, str):
        return drawn
    return replace(drawn, messages=tuple(_restyled(message) for message in drawn.messages))
