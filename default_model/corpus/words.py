"""Words, names and tables that generators draw from."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

_HERE = Path(__file__).parent
_ONSETS = "b c d f g h j k l m n p r s t v w z br ch dr kr st tr sh".split()
_VOWELS = "a e i o u a e i o ai ee ou".split()
_ENDS = ["", "", "n", "r", "l", "s", "m", "ck", "nd"]


@cache
def data(name: str) -> dict[str, Any]:
    """Read `name`.toml."""
    return tomllib.loads((_HERE / f"{name}.toml").read_text(encoding="utf-8"))


def words(kind: str) -> list[str]:
    """Return the words of one kind, such as "names" or "nouns"."""
    found: list[str] = data("words")[kind]
    return found


def invented(rng: Random) -> str:
    """Return a word that nobody has seen, in lower case."""
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 3))]
    return "".join(parts) + rng.choice(_ENDS)


def name(rng: Random) -> str:
    """Return a first name: a common one, or an invented one so that copying is learnt."""
    return rng.choice(words("names")) if rng.random() < 0.6 else invented(rng).capitalize()


def city(rng: Random) -> str:
    """Return a city: a common one, or an invented one."""
    return rng.choice(words("cities")) if rng.random() < 0.7 else invented(rng).capitalize()


def word(rng: Random) -> str:
    """Return an everyday word or an invented one."""
    kind = rng.choice(("nouns", "nouns", "adjectives", "colors", "things", ""))
    return rng.choice(words(kind)) if kind else invented(rng)


def sentence(rng: Random) -> str:
    """Return a short sentence of everyday words."""
    adjective, noun = rng.choice(words("adjectives")), rng.choice(words("nouns"))
    who = name(rng) if rng.random() < 0.4 else f"The {adjective} {noun}"
    return f"{who} {rng.choice(words('verbs'))} the {rng.choice(words('nouns'))}."
