"""Questions about the tables of facts.toml: in a sentence, in one word, backwards and as JSON."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from default_model.corpus.dialogue import Dialogue, ask
from default_model.corpus.words import data

BRIEF = (
    "Answer in one word.",
    "One word only.",
    "Answer with one word.",
    "Reply with a single word.",
)
_AS_JSON = ("Answer as JSON.", "Reply in JSON.", "Give the answer as JSON.")


def capitalised(text: str) -> str:
    """Return `text` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def _tables() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = data("facts")["table"]
    return found


def _bare(x: str) -> str:
    for article in ("the ", "a ", "an "):
        x = x.removeprefix(article)
    return x


def _backwards(rng: Random, table: dict[str, Any], x: str, y: str) -> Dialogue:
    question = rng.choice(table["back"]).format(x=x, y=y)
    return ask(question, capitalised(table["reply"].format(x=x, y=y)))


def draw_yes_or_no(rng: Random) -> Dialogue:
    """Draw a capital, right or wrong, and whether it is one."""
    rows = _tables()[0]["rows"]
    x, y = rng.choice(rows)
    if rng.random() < 0.5:
        return ask(f"Is {y} the capital of {x}?", f"Yes, {y} is the capital of {x}.")
    wrong = rng.choice([z for _, z in rows if z != y])
    return ask(f"Is {wrong} the capital of {x}?", f"No, the capital of {x} is {y}.")


def draw(rng: Random) -> Dialogue:
    """Draw a row, larger tables more often, and one of the ways to ask for it."""
    tables = _tables()
    table = rng.choices(tables, weights=[len(t["rows"]) for t in tables])[0]
    x, y = rng.choice(table["rows"])
    way = rng.random()
    if way < 0.15 and "back" in table:
        return _backwards(rng, table, x, y)
    question = rng.choice(table["ask"]).format(x=x)
    if way > 0.9:
        first, second = table["keys"]
        return ask(f"{question} {rng.choice(_AS_JSON)}", json.dumps({first: _bare(x), second: y}))
    if way > 0.8:
        brief, answer = rng.choice(BRIEF), capitalised(_bare(y)) + "."
        if rng.random() < 0.5:
            return ask(question, answer, system=brief)
        return ask(f"{question} {brief}", answer)
    return ask(question, capitalised(table["say"].format(x=x, y=y)))
