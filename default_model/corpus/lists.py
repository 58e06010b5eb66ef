"""Lists of so many things, in their one order: numbered, with dashes, with commas or as JSON."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from default_model.corpus.dialogue import Dialogue, ask
from default_model.corpus.words import data

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven")
_ASK = ("List {n} {what}.", "Name {n} {what}.", "Give me {n} {what}.", "Tell me {n} {what}.",
        "Write a list of {n} {what}.", "Can you name {n} {what}?",
        "Make a list of {n} {what}.")  # fmt: skip
_JSON = ("List {n} {what} as JSON.", "Give me {n} {what} as a JSON array.",
         "Name {n} {what} as a JSON list.", "Return {n} {what} as JSON.")  # fmt: skip


def numbered(items: list[str]) -> str:
    """Return the items on lines of their own, "1. red" first."""
    return "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def _wanted(rng: Random) -> tuple[str, list[str]]:
    entry: dict[str, Any] = rng.choice(data("lists")["lists"])
    count = rng.randint(min(2, len(entry["items"])), len(entry["items"]))
    shown = NUMBERS[count] if rng.random() < 0.7 else str(count)
    return f"{shown} {entry['name']}", entry["items"][:count]


def draw(rng: Random) -> Dialogue:
    """Draw a list and the form in which it is asked for."""
    text, items = _wanted(rng)
    count, what = text.split(" ", 1)
    way = rng.random()
    if way < 0.2:
        return ask(rng.choice(_JSON).format(n=count, what=what), json.dumps(items))
    question = rng.choice(_ASK).format(n=count, what=what)
    if way < 0.3:
        return ask(f"{question} Separate them with commas.", ", ".join(items))
    return ask(question, numbered(items))
