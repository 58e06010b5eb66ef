"""Quick proof that a schema meets the meta-schema of its draft.

It misses unusual schemas, which the meta-schema itself then judges in about ten times the time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_URI = re.compile(r"https?://[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*(/[\w.-]+)*/?#?", re.ASCII)
_LOCAL = re.compile(r"#(/[\w.$~-]+)*", re.ASCII)
_UNUSUAL = frozenset(
    (
        *("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef", "$recursiveAnchor"),
        *("$vocabulary", "dependencies", "dependentRequired", "contentSchema"),
    )
)
"""Keywords of rare schemas, or of values that differ between drafts."""


def is_well_formed(root: Any, draft: int) -> bool:
    """Return True if the schema surely meets the meta-schema of a draft; see `draft_of`."""
    stack = [root]
    while stack:
        schema = stack.pop()
        if isinstance(schema, bool) and draft > 4:
            continue
        if not isinstance(schema, dict) or not _UNUSUAL.isdisjoint(schema):
            return False
        for keyword, value in schema.items():
            if (rule := _RULES.get(keyword)) is not None:
                if not rule(value, draft):
                    return False
            elif not _push(stack, keyword, value, draft):
                return False
    return True


def _push(stack: list[Any], keyword: str, value: Any, draft: int) -> bool:
    """Add the schemas of a keyword; return False if it does not hold schemas in its form."""
    if keyword in _NAMED:
        if not isinstance(value, dict):
            return False
        stack += value.values()
        return keyword != "patternProperties" or all(map(_is_pattern, value))
    if keyword in _LISTED or (keyword == "items" and isinstance(value, list) and draft < 2020):
        stack += value if isinstance(value, list) else ()
        return isinstance(value, list) and len(value) > 0
    if keyword in ("additionalProperties", "additionalItems") and isinstance(value, bool):
        return True
    if keyword in _SINGLE:
        stack.append(value)
    return True


def _is_pattern(value: Any, _draft: int = 0) -> bool:
    if not isinstance(value, str):
        return False
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _is_type(value: Any, _draft: int) -> bool:
    if isinstance(value, str):
        return value in _TYPES
    return _are_names(value) and len(value) > 0 and _TYPES.issuperset(value)


def _are_names(value: Any) -> bool:
    """Return True for a list of texts that differ."""
    return (
        isinstance(value, list)
        and all(isinstance(item, str) for item in value)
        and len(set(value)) == len(value)
    )


def _is_required(value: Any, draft: int) -> bool:
    return _are_names(value) and (draft > 4 or len(value) > 0)


def _is_enum(value: Any, draft: int) -> bool:
    return isinstance(value, list) and (draft > 6 or (_are_names(value) and len(value) > 0))


def _is_number(value: Any, _draft: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bound(value: Any, draft: int) -> bool:
    """Return True for an exclusive bound; in draft 4 it is a boolean, which needs another."""
    return draft > 4 and _is_number(value, draft)


def _is_step(value: Any, draft: int) -> bool:
    return _is_number(value, draft) and value > 0


def _is_count(value: Any, _draft: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any, _draft: int) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any, _draft: int) -> bool:
    return isinstance(value, bool)


def _is_list(value: Any, _draft: int) -> bool:
    return isinstance(value, list)


def _is_uri(value: Any, _draft: int) -> bool:
    return isinstance(value, str) and _URI.fullmatch(value) is not None


def _is_reference(value: Any, _draft: int) -> bool:
    return isinstance(value, str) and _LOCAL.fullmatch(value) is not None


_NAMED = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"),
)
_LISTED = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_SINGLE = frozenset(
    (
        *("not", "if", "then", "else", "items", "additionalItems", "unevaluatedItems", "contains"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    )
)
_RULES: dict[str, Callable[[Any, int], bool]] = {
    "type": _is_type,
    "enum": _is_enum,
    "required": _is_required,
    "pattern": _is_pattern,
    "multipleOf": _is_step,
    "examples": _is_list,
    "$ref": _is_reference,
    **dict.fromkeys(("$id", "id", "$schema"), _is_uri),
    **dict.fromkeys(("minimum", "maximum"), _is_number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _is_bound),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _is_count),
    **dict.fromkeys(("minProperties", "maxProperties"), _is_count),
    **dict.fromkeys(("minContains", "maxContains"), _is_count),
    **dict.fromkeys(("uniqueItems", "readOnly", "writeOnly", "deprecated"), _is_flag),
    **dict.fromkeys(("title", "description", "$comment", "format"), _is_text),
    **dict.fromkeys(("contentMediaType", "contentEncoding"), _is_text),
}
