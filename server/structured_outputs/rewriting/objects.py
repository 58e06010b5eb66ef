"""Shapes of objects.

An object whose schema lists properties has no others, unless `additionalProperties` or
`patternProperties` allow them. Unlisted names may be repeated, which JSON permits, and so count
once towards the least number of properties.
"""

from __future__ import annotations

import re
from typing import Any

from server.structured_outputs.rewriting.choices import Plain
from server.structured_outputs.rewriting.document import (
    NEGATIVE,
    NOT_ONE_OF,
    InexactError,
    Node,
    SchemaDocument,
)
from server.structured_outputs.rewriting.scalars.patterns import translated
from server.structured_outputs.rewriting.shapes import Object, Property
from server.structured_outputs.schema_walk import Schema


def object_shape(document: SchemaDocument, plain: Plain) -> Object | None:
    """Return the objects that satisfy all of the schemas, or None if there are none."""
    names = list(dict.fromkeys(name for item in plain for name in item.get("properties", ())))
    required = list(dict.fromkeys(name for item in plain for name in item.get("required", ())))
    listed = []
    for name in dict.fromkeys([*names, *required]):
        node = Node.of(*(part for item in plain for part in _of_name(item, name)))
        must = name in required
        if False in node.schemas or not _may_be_name(document, plain, name):
            if must:
                return None
            continue
        listed.append(Property(name, node, must))
    others = _others(document, plain, {*names, *required})
    least = max((int(item.get("minProperties", 0)) for item in plain), default=0)
    most = [int(item["maxProperties"]) for item in plain if "maxProperties" in item]
    if least > len(listed) + bool(others):
        if not others:
            return None
        document.leave_out(
            plain[0],
            f"'minProperties' of {least} cannot be counted among unlisted names; list at least "
            f"{least - 1} properties, or leave it out",
        )
        least = 0
    return Object(tuple(listed), tuple(others), least, min(most, default=None), document.open)


def _of_name(schema: Schema, name: str) -> list[Any]:
    """Return the schemas of the property in one schema.

    If Python's `re` and ECMA-262 differ about a pattern, both readings apply.
    """
    found = [schema["properties"][name]] if name in schema.get("properties", ()) else []
    surely = bool(found)
    for pattern, inner in schema.get("patternProperties", {}).items():
        python, ecma = _matches(pattern, name)
        if python or ecma:
            found.append(inner)
        surely |= python and ecma
    return found if surely else [*found, schema.get("additionalProperties", True)]


def _matches(pattern: str, name: str) -> tuple[bool, bool]:
    """Return whether the pattern matches by Python's `re`, and by ECMA-262.

    In ECMA-262, `\\w` and similar classes are ASCII, and `$` does not match before a line end.
    """
    ecma = f"{name[:-1]}\r" if name.endswith("\n") else name
    return bool(re.search(pattern, name)), bool(re.search(pattern, ecma, re.ASCII))


def _may_be_name(document: SchemaDocument, plain: Plain, name: str) -> bool:
    return all(
        document.is_valid(name, item["propertyNames"]) for item in plain if "propertyNames" in item
    )


def _others(document: SchemaDocument, plain: Plain, listed: set[str]) -> list[tuple[Node, Node]]:
    """Return the names and values of unlisted properties."""
    own = [item for item in plain if NEGATIVE not in item]
    names: list[Any] = [{"type": "string"}]
    names += [item["propertyNames"] for item in plain if "propertyNames" in item]
    if listed:
        names.append({NOT_ONE_OF: sorted(listed)})
    patterns = list(dict.fromkeys(p for item in own for p in item.get("patternProperties", ())))
    found = []
    for pattern in patterns:
        try:
            translated(pattern)
        except InexactError as error:
            document.leave_out(plain[0], error)
            continue
        values = [part for item in plain for part in _of_pattern(item, pattern)]
        found.append((Node.of(*names, {"pattern": pattern}), Node.of(*values)))
    lists = any(item.get("properties") or item.get("patternProperties") for item in own)
    open_ = document.open or any("additionalProperties" in item for item in own)
    if open_ or not lists:
        values = [item.get("additionalProperties", True) for item in plain]
        # A name may match a pattern too, whose schema then applies as well.
        values += [inner for item in plain for inner in item.get("patternProperties", {}).values()]
        found.append((Node.of(*names), Node.of(*values)))
    return [(name, value) for name, value in found if False not in value.schemas]


def _of_pattern(schema: Schema, pattern: str) -> list[Any]:
    """Return the schemas of names that match the pattern, and of overlapping patterns."""
    given = schema.get("patternProperties", {})
    found = [inner for other, inner in given.items() if not _apart(pattern, other)]
    return found if pattern in given else [*found, schema.get("additionalProperties", True)]


def _apart(one: str, other: str) -> bool:
    """Return True if no name matches both, because their fixed prefixes differ."""
    if one == other:
        return False
    heads = [re.match(r"\^([\w-]+)", re.sub(r"[\w-][*+?{].*", "", item)) for item in (one, other)]
    if heads[0] is None or heads[1] is None or "|" in one + other:
        return False
    first, second = heads[0][1], heads[1][1]
    return not first.startswith(second) and not second.startswith(first)
