"""Size limits of a schema: nesting, values, enums and patterns."""

from __future__ import annotations

from typing import Any

from server.structured_outputs.constraint import SchemaLimits, UnusableError


def check_size(schema: Any, limits: SchemaLimits) -> None:
    """Raise `UnusableError` if a schema or structural tag exceeds a limit."""
    stack: list[tuple[Any, int]] = [(schema, 1)]
    nodes = 0
    while stack:
        value, depth = stack.pop()
        nodes += 1
        if nodes > limits.max_nodes:
            raise UnusableError(
                f"it has more than {limits.max_nodes} objects, arrays and values, the limit of "
                "this server"
            )
        if not isinstance(value, dict | list):
            continue
        if depth > limits.max_depth:
            raise UnusableError(
                f"it is nested deeper than {limits.max_depth} levels, the limit of this server"
            )
        if isinstance(value, dict):
            _check_lengths(value, limits)
            value = list(value.values())
        stack += [(item, depth + 1) for item in value]


def check_pattern_length(pattern: str, what: str, limits: SchemaLimits) -> None:
    """Raise `UnusableError` if a regular expression is too long."""
    if len(pattern) > limits.max_pattern:
        raise UnusableError(
            f"{what} has {len(pattern)} characters; the limit of this server is "
            f"{limits.max_pattern}"
        )


def _check_lengths(schema: dict[str, Any], limits: SchemaLimits) -> None:
    if isinstance(enum := schema.get("enum"), list) and len(enum) > limits.max_enum:
        raise UnusableError(
            f"an enum has {len(enum)} values; the limit of this server is {limits.max_enum}"
        )
    if isinstance(pattern := schema.get("pattern"), str):
        check_pattern_length(pattern, "a pattern", limits)
    if isinstance(named := schema.get("patternProperties"), dict):
        for pattern in named:
            check_pattern_length(pattern, "a pattern of patternProperties", limits)
