"""What a generator makes: a conversation, or a plain text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

# One question in so many is never trained on; the evaluation asks those.
HELD_BACK_ONE_IN = 12

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Messages as the chat API has them, the answer last, and the tools that were offered."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    # What decides whether the dialogue is held back, where that is not the question's wording.
    key: str = ""
    # Where the answer is a JSON object that may have any of several pairs: all of them.
    pairs: dict[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The last thing that the user said."""
        asked: str = next(m["content"] for m in reversed(self.messages) if m["role"] == "user")
        return asked

    @property
    def answer(self) -> Message:
        """The assistant's last message."""
        return self.messages[-1]


Generator = Callable[[Random], Dialogue]


def ask(question: str, answer: str, *, system: str = "", key: str = "") -> Dialogue:
    """Return the dialogue of one question and one answer."""
    turns: list[Message] = [{"role": "system", "content": system}] if system else []
    turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Dialogue(tuple(turns), key=key)


def is_held_back(dialogue: Dialogue) -> bool:
    """Tell whether `dialogue` is kept for the evaluation, by the letters of its key alone."""
    letters = "".join(
        c for c in (dialogue.key or dialogue.question).lower() if c.isalnum() or c in "+-*"
    )
    return hashlib.sha256(letters.encode()).digest()[0] % HELD_BACK_ONE_IN == 0


def decorate(rng: Random, dialogue: Dialogue) -> Dialogue:
    """Ask the same a little differently, now and then, as people do."""
    *before, asked, answer = dialogue.messages
    question = asked["content"]
    forms = (question.lower(), question.rstrip("?.!"), f"Please answer: {question}",
             f"{question} Please.", f"Hi! {question}")  # fmt: skip
    drawn = rng.choices((question, *forms), weights=(80, 7, 5, 3, 3, 2))[0]
    return replace(dialogue, messages=(*before, {**asked, "content": drawn}, answer))
