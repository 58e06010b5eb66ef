"""Requests whose answers repeat known text, and one whose answer does not.

The number of a request changes its texts, so no answer repeats an earlier one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

_VERBS = ("load", "store", "merge", "check", "count", "split", "parse", "write", "order", "close")
_NOUNS = ("table", "index", "record", "page", "bucket", "batch", "header", "token", "block", "row")
_FILE_LINES = 150
_QUOTED_SENTENCES = 120


def edit(number: int) -> dict[str, Any]:
    """Return a request to rename a variable in 150 lines; the answer's start is given."""
    before, after = f"cursor_{number}", f"position_{number}"
    source = _source(number, before)
    begun = "```python\n" + "\n".join(source[:4]).replace(before, after) + "\n"
    return {
        "messages": [
            {
                "role": "user",
                "content": f"Rename {before} to {after} in this file and print all of it:\n"
                "```python\n" + "\n".join(source) + "\n```",
            },
            {"role": "assistant", "content": begun},
        ],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def edit_with_prediction(number: int) -> dict[str, Any]:
    """Return the same request with the unchanged file as prediction."""
    rest = "\n".join(_source(number, f"cursor_{number}")[4:]) + "\n```"
    return {**edit(number), "prediction": {"type": "content", "content": rest}}


def fill_json(number: int) -> dict[str, Any]:
    """Return a request for twelve objects of six fields, by a schema."""
    texts = {name: {"type": "string", "maxLength": 24} for name in ("title", "city", "language")}
    numbers = {name: {"type": "integer", "maximum": 9999} for name in ("year", "pages", "copies")}
    item = {
        "type": "object",
        "properties": {**texts, **numbers},
        "required": [*texts, *numbers],
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "properties": {
            "books": {"type": "array", "items": item, "minItems": 12, "maxItems": 12},
        },
        "required": ["books"],
        "additionalProperties": False,
    }
    return {
        "messages": [{"role": "user", "content": f"Twelve books of library {number}, as JSON."}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "books", "schema": schema, "strict": True},
        },
    }


def quote(number: int) -> dict[str, Any]:
    """Return a request to repeat a text of about 2,000 tokens word for word."""
    chooser = random.Random(number)
    sentences = []
    for _ in range(_QUOTED_SENTENCES):
        subject, thing, verb = (
            chooser.choice(_NOUNS),
            chooser.choice(_NOUNS),
            chooser.choice(_VERBS),
        )
        room = chooser.randrange(100)
        sentences.append(f"The {subject} of room {room} will {verb} the {thing} before noon.")
    return {
        "messages": [
            {
                "role": "user",
                "content": f"{' '.join(sentences)}\n\nRepeat the text above word for word.",
            },
            {"role": "assistant", "content": " ".join(sentences[:3])},
        ],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def talk(number: int) -> dict[str, Any]:
    """Return a request for a new text."""
    subject = _NOUNS[number % len(_NOUNS)]
    return {
        "messages": [
            {"role": "user", "content": f"Tell a story of {number} sailors who find a {subject}."}
        ]
    }


TASKS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "edit": edit,
    "edit, prediction": edit_with_prediction,
    "JSON": fill_json,
    "quote": quote,
    "talk": talk,
}


def _source(number: int, name: str) -> list[str]:
    chooser = random.Random(number)
    lines = [f'"""Module {number}."""', "", f"{name} = 0", ""]
    while len(lines) < _FILE_LINES:
        verb, noun = chooser.choice(_VERBS), chooser.choice(_NOUNS)
        lines += [
            f"def {verb}_{noun}_{len(lines)}({noun}, limit={chooser.randrange(100)}):",
            f"    if {noun} is None or {name} > limit:",
            f'        raise ValueError("no {noun} to {verb}")',
            f"    return {verb}({noun}, {name} + {chooser.randrange(9)})",
            "",
        ]
    return lines[:_FILE_LINES]
