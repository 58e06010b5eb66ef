"""The grammar of a custom tool's input, and its place in the schema of a function.

vLLM knows functions only. A custom tool is a function with one argument, `input`, whose schema has
the grammar under a keyword of this server; the model reads it there. When vLLM has made one
constraint of all tools, a constant takes the place of each such schema, it is rewritten, and the
constant's literal becomes the rule of the grammar.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.rewriting.rules import MARK, quoted
from server.structured_outputs.tool_inputs.json_text import json_regex
from server.structured_outputs.tool_inputs.lark_source import json_lark

INPUT = "input"
"""The only argument of the function that replaces a custom tool."""
KEYWORD = "x-input-grammar"
_ANCHORS = re.compile(r"\^?((?:[^\\]|\\.)*?\\?)\$?", re.DOTALL)
"""Any pattern, with its anchors outside of the group."""
SYNTAXES = ("lark", "regex")
_STAND_IN = "\ue000custom tool input {}\ue000"
"""Constant in the place of a grammar, of private characters, which schemas do not have."""


@dataclass(frozen=True, slots=True)
class InputGrammar:
    """A grammar in one of `SYNTAXES`, by which a tool's input is generated."""

    syntax: str
    definition: str

    def rule(self) -> str:
        """Return the body of a rule for the input as a JSON string with its quotes.

        Raises `UnusableError` for parts that have no translation.
        """
        if self.syntax == "regex":
            pattern = _ANCHORS.fullmatch(self.definition)
            assert pattern is not None
            return f"/\\x22(?:{json_regex(pattern[1])})\\x22/"
        return f'"\\"" %lark {{\n{json_lark(self.definition)}\n}} "\\""'

    def text(self) -> str:
        """Return the grammar, in llguidance's dialect, of the input alone."""
        return f"{MARK}start: {self.rule()}\n"


def input_schema(grammar: InputGrammar | None) -> dict[str, Any]:
    """Return the parameters of the function that replaces a custom tool."""
    schema: dict[str, Any] = {"type": "string"}
    if grammar is not None:
        schema[KEYWORD] = {"syntax": grammar.syntax, "definition": grammar.definition}
    return {
        "type": "object",
        "properties": {INPUT: schema},
        "required": [INPUT],
        "additionalProperties": False,
    }


def grammar_of(parameters: Any) -> InputGrammar | None:
    """Return the grammar in parameters that `input_schema` has made; None for all others."""
    try:
        given = parameters["properties"][INPUT][KEYWORD]
        syntax, definition = given["syntax"], given["definition"]
    except (KeyError, TypeError):
        return None
    if not isinstance(syntax, str) or not isinstance(definition, str):
        return None
    found = InputGrammar(syntax, definition)
    return found if parameters == input_schema(found) else None


def with_stand_ins(value: Any) -> tuple[Any, list[InputGrammar]]:
    """Return a schema or tag with a constant for each grammar in it, and the grammars."""
    grammars: list[InputGrammar] = []
    return _replaced(value, grammars), grammars


def with_rules(grammar: str, inputs: list[InputGrammar]) -> str:
    """Return a rewritten grammar with the rules of `inputs` for the constants.

    Raises `UnusableError` if the rewriting has changed a constant, which forbids its use.
    """
    for index, item in enumerate(inputs):
        literal = quoted(json.dumps(_STAND_IN.format(index), ensure_ascii=False))
        if literal not in grammar:
            raise UnusableError("the grammar of a tool's input has no place in that of all calls")
        name = f"tool_input_{index}"
        grammar = f"{grammar.replace(literal, name)}{name}: {item.rule()}\n"
    return grammar


def _replaced(value: Any, grammars: list[InputGrammar]) -> Any:
    if isinstance(value, list):
        return [_replaced(item, grammars) for item in value]
    if not isinstance(value, dict):
        return value
    if (found := grammar_of(value)) is None:
        return {name: _replaced(item, grammars) for name, item in value.items()}
    if found not in grammars:
        grammars.append(found)
    stand_in = {"const": _STAND_IN.format(grammars.index(found))}
    return {**value, "properties": {INPUT: stand_in}}
