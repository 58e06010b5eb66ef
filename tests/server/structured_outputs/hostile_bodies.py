"""Hostile chat requests from a seed: wrong and costly constraints in every field."""

from __future__ import annotations

import random
from typing import Any

HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1e308, "", "x" * 300, "\ud83d", "\x00", [], {}, [[]], [None], {"a": None}),
    *({"type": "object"}, {"$ref": "#"}, {"enum": []}, "((", "root ::= root", [1], {"": {"": {}}}),
)


def hostile_body(pick: random.Random) -> dict[str, Any]:
    """Return a chat request that is wrong, costly or, rarely, valid."""

    def nest(depth: int) -> Any:
        key = pick.choice(("items", "properties", "anyOf", "$ref", "pattern", "enum", "x", "allOf"))
        value = nest(depth - 1) if depth else pick.choice(HOSTILE_VALUES)
        return pick.choice(({key: value}, {"type": pick.choice(("array", "object")), key: value},
                            [value], {key: [value, value] if depth < 8 else value}))  # fmt: skip

    def letters(of: str) -> str:
        return "".join(pick.choices(of, k=40))

    costly = (
        lambda: {"type": "string", "pattern": "(" * pick.randint(1, 300) + "a" + ")+" * 300},
        lambda: {"enum": ["v" * pick.randint(1, 40) for _ in range(pick.randint(1, 2000))]},
        lambda: {"type": "array", "minItems": pick.choice((0, 10**6, 2**31, 2**70))},
        lambda: {"type": "string", "maxLength": pick.choice((-1, 10**9, 2**40))},
        lambda: {"type": "integer", "minimum": -(10**40), "maximum": 10**40},
        lambda: nest(pick.randint(0, 70)),
    )
    schema = pick.choice(costly)()
    fields: tuple[dict[str, Any], ...] = (
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {pick.choice(("json", "regex", "choice", "grammar",
                                             "structural_tag", "json_object", "nope")):
                                pick.choice(HOSTILE_VALUES)}},
        {"structured_outputs": {"regex": letters("()[]{}*+?|\\^$ab.1,")}},
        {"structured_outputs": {"grammar": "root ::= " + letters('ab"|()*+?[]:= \n')}},
        {"response_format": {"type": "json_schema", "json_schema": schema}},
        {"response_format": {"type": "json_schema",
                             "json_schema": {"name": "x", "schema": schema}}},
        {"response_format": {"type": "structural_tag", "format": schema}},
        {"response_format": pick.choice(HOSTILE_VALUES)},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
         "tool_choice": pick.choice(("required", "auto", {"type": "function"}, None))},
        {"structured_outputs": {"regex": pick.choice(HOSTILE_VALUES)}},
        {pick.choice(("temperature", "messages", "stop", "n", "logit_bias", "stream")):
         pick.choice(HOSTILE_VALUES)},
    )  # fmt: skip
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 2} | pick.choice(fields)
