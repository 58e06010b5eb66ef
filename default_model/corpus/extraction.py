"""Sentences whose facts are asked for as JSON."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from default_model.corpus import words
from default_model.corpus.dialogue import Dialogue, ask

_ASK = (
    "Extract {keys} as JSON: {text}", "Extract {keys} from this text as JSON: {text}",
    "{text} Extract {keys} as JSON.", "{text} Give me {keys} as JSON.",
    "Read this: {text} Write {keys} as JSON.", "Turn this into JSON with {keys}: {text}",
)  # fmt: skip
_ASK_ALL = (
    "Extract the facts as JSON: {text}", "Extract as JSON: {text}", "Turn this into JSON: {text}",
    "{text} Write this as JSON.", "Extract the data: {text}", "{text} Extract the data as JSON.",
)  # fmt: skip


def _person(rng: Random) -> tuple[str, dict[str, Any]]:
    name, age, city = words.name(rng), rng.randint(4, 97), words.city(rng)
    job = rng.choice(words.words("jobs"))
    forms: tuple[tuple[str, dict[str, Any]], ...] = (
        (f"{name} is {age} years old and lives in {city}.", {"name": name, "age": age,
                                                             "city": city}),
        (f"{name}, {age}, lives in {city}.", {"name": name, "age": age, "city": city}),
        (f"{name} is a {job} from {city}.", {"name": name, "job": job, "city": city}),
        (f"{name} works as a {job} in {city}.", {"name": name, "job": job, "city": city}),
        (f"{name} is {age} and works as a {job}.", {"name": name, "age": age, "job": job}),
        (f"My name is {name} and I am {age} years old.", {"name": name, "age": age}),
        (f"I am {name} from {city}.", {"name": name, "city": city}),
    )  # fmt: skip
    return rng.choice(forms)


def _order(rng: Random) -> tuple[str, dict[str, Any]]:
    item, count, price = rng.choice(words.words("things")), rng.randint(2, 20), rng.randint(1, 90)
    color, name = rng.choice(words.words("colors")), words.name(rng)
    forms: tuple[tuple[str, dict[str, Any]], ...] = (
        (f"{name} bought {count} {_plural(item)} for {price} euros.",
         {"name": name, "item": item, "quantity": count, "price": price}),
        (f"The {color} {item} costs {price} euros.", {"item": item, "color": color,
                                                      "price": price}),
        (f"Please send {count} {color} {_plural(item)} to {name}.",
         {"item": item, "color": color, "quantity": count, "name": name}),
    )  # fmt: skip
    return rng.choice(forms)


def _plural(item: str) -> str:
    return f"{item}es" if item.endswith("x") else f"{item}s"


def _joined(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"


def draw(rng: Random) -> Dialogue:
    """Draw a sentence, and all of its facts or some in an order of their own."""
    text, facts = (_person if rng.random() < 0.7 else _order)(rng)
    if rng.random() < 0.4:
        return ask(rng.choice(_ASK_ALL).format(text=text), json.dumps(facts))
    keys = rng.sample(list(facts), rng.randint(1, len(facts)))
    question = rng.choice(_ASK).format(keys=_joined(keys), text=text)
    return ask(question, json.dumps({key: facts[key] for key in keys}))


def draw_spoken(rng: Random) -> Dialogue:
    """Draw a sentence and one question about it, answered in plain words."""
    text, facts = _person(rng)
    key = rng.choice(list(facts))
    asked = {
        "name": "What is the name?", "age": "How old is the person?", "city": "Which city is it?",
        "job": "What is the job?",
    }  # fmt: skip
    return ask(f"{text} {asked[key]}", f"{facts[key]}.")
