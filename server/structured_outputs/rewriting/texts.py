"""Strings: lengths, patterns and formats, together and in any number."""

from __future__ import annotations

import functools
import json
from typing import Any

import llguidance

from server.structured_outputs.rewriting.alternatives import Plain
from server.structured_outputs.rewriting.document import NOT_ONE_OF, Document, InexactError
from server.structured_outputs.rewriting.formats import FORMATS
from server.structured_outputs.rewriting.patterns import other_than, translated, whole
from server.structured_outputs.schema_walk import Schema


def text_schema(document: Document, plain: Plain) -> Schema | None:
    """Return one schema of the backend's for the strings that satisfy all, or None for none."""
    shortest = max((schema.get("minLength", 0) for schema in plain), default=0)
    longest = min((schema["maxLength"] for schema in plain if "maxLength" in schema), default=None)
    if longest is not None and shortest > longest:
        return None
    found: Schema = {"type": "string"}
    if shortest:
        found["minLength"] = int(shortest)
    if longest is not None:
        found["maxLength"] = int(longest)
    patterns: list[str] = []
    for schema in plain:
        try:
            patterns += _patterns(schema)
        except InexactError as error:
            document.leave_out(schema, error)
    if patterns:
        found["allOf"] = [{"pattern": pattern} for pattern in dict.fromkeys(patterns)]
    return None if patterns and _is_empty(json.dumps(found)) else found


@functools.lru_cache(1024)
def _is_empty(schema: str) -> bool:
    """Whether surely no string satisfies one of the backend's schemas; the backend tells."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    return "Unsatisfiable schema" in llguidance.LLMatcher.validate_grammar(grammar)


def _patterns(schema: Schema) -> list[str]:
    found = []
    if "pattern" in schema:
        found.append(translated(schema["pattern"]))
    if schema.get("format") in FORMATS:
        found.append(whole(FORMATS[schema["format"]]))
    if words := _texts(schema.get(NOT_ONE_OF, ())):
        found.append(other_than(words))
    return found


def _texts(values: Any) -> set[str]:
    return {value for value in values if isinstance(value, str)}
