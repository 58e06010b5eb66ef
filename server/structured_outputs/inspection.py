"""Checks of a constraint without compiling it.

Pure functions of the constraint's text. Hostile input may take them long, so that they run in a
trial process, never on the event loop.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

from server.errors import json_type
from server.structured_outputs.constraint import (
    Constraint,
    ConstraintKind,
    SchemaLimits,
    UnusableError,
)
from server.structured_outputs.grammars import MARK, regex_grammar
from server.structured_outputs.normaliser import normalised
from server.structured_outputs.schema_exactness import check_exact
from server.structured_outputs.schema_limits import check_pattern_length, check_size

_MAX_DIGITS = 400
"""Characters of an integer; Python refuses to format thousands of digits."""


def inspect(constraint: Constraint, limits: SchemaLimits) -> Any:
    """Return the value of a schema or of a tag; None for other constraints.

    Raises `UnusableError` if the constraint is too large, malformed or not supported.
    """
    text = constraint.text
    if constraint.kind is ConstraintKind.REGEX:
        _check_regex(text, limits)
    elif constraint.kind is ConstraintKind.GRAMMAR:
        if not text.strip():
            raise UnusableError("it is empty")
        if not text.startswith(MARK):
            _check_escapes(text)
    elif constraint.kind is ConstraintKind.CHOICE:
        _check_choice(json.loads(text), limits)
    elif constraint.kind is ConstraintKind.JSON:
        schema = parsed(text)
        _check_schema(schema, limits)
        return schema
    else:
        tag = parsed(text)
        if not isinstance(tag, dict):
            raise UnusableError(f"it must be an object, got {json_type(tag)}")
        check_size(tag, limits)
        for schema in _schemas_of_tag(tag):
            _check_schema(schema, limits)
        return tag
    return None


def check_unrewritten(constraint: Constraint) -> None:
    """Raise `UnusableError` for a schema that xgrammar does not take.

    What an exact constraint has must be followed.
    """
    if constraint.kind is ConstraintKind.JSON:
        schemas = [parsed(constraint.text)]
    elif constraint.kind is ConstraintKind.STRUCTURAL_TAG:
        schemas = list(_schemas_of_tag(parsed(constraint.text)))
    else:
        return
    for schema in schemas:
        # Refuses malformed schemas, and those that refer to themselves.
        normalised(schema, closed=False)
        if constraint.exact:
            check_exact(schema)


def parsed(text: str) -> Any:
    """Return the JSON value of `text`. Raises `UnusableError`."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite, parse_int=_short)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UnusableError("it has half of a surrogate pair, which UTF-8 cannot hold") from None
    except ValueError as error:
        raise UnusableError(f"it is not valid JSON: {error}") from None
    except RecursionError:
        raise UnusableError("it is nested too deeply to be read") from None
    return value


def _short(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer has more than {_MAX_DIGITS} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is beyond what a double holds")
    return value


def _check_regex(pattern: str, limits: SchemaLimits) -> None:
    if not pattern:
        raise UnusableError("it is empty")
    if "\0" in pattern:
        raise UnusableError("it has a NUL character")
    check_pattern_length(pattern, "it", limits)


_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]+)|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
"""An escape of EBNF, with its code point."""


def _check_escapes(grammar: str) -> None:
    """Raise `UnusableError` for an escape of EBNF that UTF-8 cannot hold."""
    for found in _ESCAPE.finditer(grammar):
        code = int(found[found.lastindex], 16) if found.lastindex else 0
        if code in range(0xD800, 0xE000) or code > sys.maxunicode:
            raise UnusableError(
                f"the escape '{found[0][:20]}' at character {found.start() + 1} is half of a "
                "surrogate pair or no character"
            )


def _check_choice(choices: list[str], limits: SchemaLimits) -> None:
    if not choices:
        raise UnusableError("it has no values")
    if len(choices) > limits.max_enum:
        raise UnusableError(
            f"it has {len(choices)} values; the limit of this server is {limits.max_enum}"
        )


def _check_schema(schema: Any, limits: SchemaLimits) -> None:
    if not isinstance(schema, dict | bool):
        raise UnusableError(f"it must be an object, got {json_type(schema)}")
    check_size(schema, limits)


def _schemas_of_tag(tag: Any) -> Iterator[Any]:
    """Yield the JSON schemas in a structural tag of either form.

    Raises `UnusableError` for a regex or a grammar that is read differently.
    """
    stack = [tag]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            if value.get("type") == "json_schema" and "json_schema" in value:
                yield value["json_schema"]
            elif {"begin", "schema", "end"} <= value.keys():
                yield value["schema"]
            elif value.get("type") == "regex" and isinstance(value.get("pattern"), str):
                regex_grammar(value["pattern"])
            elif value.get("type") == "grammar" and isinstance(value.get("grammar"), str):
                _check_escapes(value["grammar"])
            else:
                stack += value.values()
