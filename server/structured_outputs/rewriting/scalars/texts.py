"""Strings: combinations of lengths, patterns and formats."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import llguidance

from server.structured_outputs.rewriting.choices import Plain
from server.structured_outputs.rewriting.document import NOT_ONE_OF, InexactError, SchemaDocument
from server.structured_outputs.rewriting.scalars.formats import (
    FORMAT_LENGTHS,
    FORMATS,
    WIDE_FORMATS,
)
from server.structured_outputs.rewriting.scalars.patterns import other_than, translated, whole
from server.structured_outputs.schema_walk import Schema


def text_schema(document: SchemaDocument, plain: Plain) -> Schema | None:
    """Return a schema of llguidance for the strings that satisfy all, or None if there are none."""
    shortest = max((schema.get("minLength", 0) for schema in plain), default=0)
    longest = min(_longest(document, plain), default=None)
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
            patterns += _patterns(schema, wide=document.wide)
        except InexactError as error:
            document.leave_out(schema, error)
    if not patterns:
        return found
    whole_schema = {**found, "allOf": [{"pattern": item} for item in dict.fromkeys(patterns)]}
    try:
        return None if _is_empty(json.dumps(whole_schema)) else whole_schema
    except InexactError as error:
        document.leave_out(plain[0], error)
        return found


def _longest(document: SchemaDocument, plain: Plain) -> Iterator[int]:
    for schema in plain:
        if "maxLength" in schema:
            yield schema["maxLength"]
        if not document.wide and schema.get("format") in FORMAT_LENGTHS:
            yield FORMAT_LENGTHS[schema["format"]]


@functools.lru_cache(1024)
def _is_empty(schema: str) -> bool:
    """Return True if no string satisfies a schema of llguidance.

    Raises `InexactError` if llguidance cannot decide it.
    """
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    problem = llguidance.LLMatcher.validate_grammar(grammar)
    if "Unable to determine" in problem:
        raise InexactError(
            "the lengths, patterns and formats of a string are too complex together; leave one out"
        )
    return "Unsatisfiable schema" in problem


def _patterns(schema: Schema, *, wide: bool) -> list[str]:
    found = []
    if "pattern" in schema:
        found.append(translated(schema["pattern"], wide=wide))
    formats = WIDE_FORMATS if wide else FORMATS
    if schema.get("format") in formats:
        found.append(whole(formats[schema["format"]]))
    if words := _texts(schema.get(NOT_ONE_OF, ())):
        found.append(other_than(words))
    return found


def _texts(values: Any) -> set[str]:
    return {value for value in values if isinstance(value, str)}
