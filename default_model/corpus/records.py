"""Things described as JSON: countries from the tables, and plausible values for common keys."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

from default_model.corpus.dialogue import Dialogue, ask
from default_model.corpus.words import data

# What stands behind a key when the question leaves it open: one value each, so that it is learnt.
PLAUSIBLE: dict[str, Any] = {
    "name": "Ana", "first_name": "Ana", "last_name": "Miller", "age": 31, "city": "Rome",
    "country": "Italy",
    "email": "ana@example.com", "phone": "555-0123", "job": "teacher", "language": "Italian",
    "title": "The River",
    "author": "Ana Miller", "year": 1999, "price": 12, "color": "blue", "size": "medium",
    "quantity": 3, "count": 3,
    "id": 7, "active": True, "date": "2026-05-14", "time": "12:30", "rating": 4, "tags": ["small",
                                                                                          "blue"],
    "street": "Main Street 5", "zip": "10115", "capital": "Rome", "temperature": 21,
    "unit": "celsius",
    "description": "A small example.", "status": "ready", "animal": "dog", "answer": "yes",
    "score": 8, "x": 3, "y": 4,
    "width": 20, "height": 10, "weight": 5, "product": "lamp", "brand": "Nord", "pages": 210,
    "genre": "novel",
}  # fmt: skip
_KINDS: dict[str, tuple[str, ...]] = {
    "person": ("name", "age", "city", "job", "email", "country"),
    "user": ("id", "name", "email", "active", "age"),
    "book": ("title", "author", "year", "pages", "genre"),
    "product": ("product", "price", "color", "brand", "size", "rating"),
    "point": ("x", "y"),
    "address": ("street", "city", "zip", "country"),
    "order": ("id", "product", "quantity", "price", "status"),
    "event": ("title", "date", "time", "city"),
    "box": ("width", "height", "weight", "color"),
}
_ASK = ("Describe {} as JSON.", "Tell me about {} as JSON.", "Give me {} as JSON.",
        "Write {} as a JSON object.", "Return {} in JSON.", "JSON for {}, please.")  # fmt: skip


@cache
def countries() -> dict[str, dict[str, str]]:
    """Return what the tables know of each country, by its name."""
    found: dict[str, dict[str, str]] = {}
    for table in data("facts")["table"]:
        if table["keys"][0] == "country":
            for x, y in table["rows"]:
                bare = x.removeprefix("the ")
                found.setdefault(bare, {"country": bare})[table["keys"][1]] = y
    return found


def _some(rng: Random, keys: list[str]) -> list[str]:
    chosen = rng.sample(keys, rng.randint(min(2, len(keys)), len(keys)))
    return chosen if rng.random() < 0.5 else [key for key in keys if key in chosen]


def draw_country(rng: Random) -> Dialogue:
    """Draw a country or its capital and some of what is known of it."""
    record = rng.choice(list(countries().values()))
    facts = {"name": record["country"], **record}
    subject = record["country"]
    if "capital" in record and rng.random() < 0.5:
        subject = record["capital"]
        facts = {"name": subject, "city": subject, **record}
        del facts["capital"]
    keys = _some(rng, list(facts))
    answered = ask(rng.choice(_ASK).format(subject), json.dumps({key: facts[key] for key in keys}))
    return replace(answered, pairs=facts)


def draw_kind(rng: Random) -> Dialogue:
    """Draw a kind of thing, or a list of keys, and the plausible values of its keys."""
    if rng.random() < 0.5:
        kind, known = rng.choice(list(_KINDS.items()))
        keys = _some(rng, list(known)) if rng.random() < 0.5 else list(known)
        article = "an" if kind[0] in "aeo" else "a"
        question = rng.choice(_ASK).format(f"{article} {kind}")
        if rng.random() < 0.4:
            question += f" Use the keys {', '.join(keys)}."
    else:
        keys = rng.sample(list(PLAUSIBLE), rng.randint(1, 4))
        question = rng.choice(_ASK).format(f"an example with {', '.join(keys)}")
    answered = ask(question, json.dumps({key: PLAUSIBLE[key] for key in keys}))
    return replace(answered, pairs=PLAUSIBLE)
