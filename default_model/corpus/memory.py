"""Conversations in which something that was said before is asked for."""

from __future__ import annotations

from random import Random

from default_model.corpus import words
from default_model.corpus.dialogue import Dialogue, Generator, Message


def _said(rng: Random) -> tuple[str, str, str, str]:
    """Return what is told, what is answered, what is asked later and the answer."""
    name, city, color = words.name(rng), words.city(rng), rng.choice(words.words("colors"))
    thing = rng.choice(words.words("things"))
    forms = (
        (rng.choice(("My name is {}.", "I am {}.", "Hi, I am {}.",
                     "Hello, my name is {}.")).format(name),
         f"Nice to meet you, {name}!",
         rng.choice(("What is my name?", "Who am I?", "Do you know my name?")),
         f"Your name is {name}."),
        (rng.choice(("I live in {}.", "I am from {}.")).format(city),
         f"I see, you are from {city}.",
         rng.choice(("Where do I live?", "Where am I from?", "Which city am I from?")),
         f"You are from {city}."),
        (f"My favourite color is {color}.", f"{color.capitalize()} is a nice color.",
         rng.choice(("What is my favourite color?", "Which color do I like?")),
         f"Your favourite color is {color}."),
        (f"I bought a {thing}.", f"A {thing} is useful.", "What did I buy?",
         f"You bought a {thing}."),
    )  # fmt: skip
    return rng.choice(forms)


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def remembering(other: Generator) -> Generator:
    """Return a generator of such conversations, with turns of `other` in between."""

    def draw(rng: Random) -> Dialogue:
        told, reply, question, answer = _said(rng)
        turns = [_turn("user", told), _turn("assistant", reply)]
        for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
            turns.extend(other(rng).messages)
        turns += [_turn("user", question), _turn("assistant", answer)]
        return Dialogue(tuple(turns))

    return draw
