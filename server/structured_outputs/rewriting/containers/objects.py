"""Shapes of objects.

An object whose schema lists properties has no others, unless `additionalProperties` or
`patternProperties` allow them. Unlisted names may be repeated, which JSON permits, and so count
once towards the least number of properties.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.rewriting.choices import Plain
from server.structured_outputs.rewriting.document import (
    HAS,
    NEGATIVE,
    NOT_ONE_OF,
    NOT_PATTERNS,
    InexactError,
    Node,
    SchemaDocument,
)
from server.structured_outputs.rewriting.scalars.patterns import matching
from server.structured_outputs.rewriting.shapes import Object, Property
from server.structured_outputs.rewriting.values import matches
from server.structured_outputs.schema_walk import Schema

MAX_CASES = 64
"""Most cases of a negation about properties: which of them satisfies it."""
_OPEN: Schema = {"additionalProperties": True, NEGATIVE: True}


def object_shapes(document: SchemaDocument, plain: Plain) -> list[Object]:
    """Return the objects that satisfy all of the schemas, as a union."""
    pairs = [pair for item in plain for pair in item.get(HAS, ())]
    if not pairs:
        return _shapes(document, plain, None)
    cases = _cases(document, plain, pairs)
    return [shape for case in cases for shape in _shapes(document, *case)]


def _cases(
    document: SchemaDocument, plain: Plain, pairs: list[list[Any]]
) -> list[tuple[Plain, list[Any] | None]]:
    """Return schemas by which property satisfies each pair: a listed one, or an unlisted one."""
    names = list(
        dict.fromkeys(
            name
            for item in plain
            for name in (*item.get("properties", ()), *item.get("required", ()))
        )
    )
    cases: list[tuple[Plain, list[Any] | None]] = [(plain, None)]
    for name_schema, value_schema in pairs:
        able = [name for name in names if _is_named(document, name, name_schema)]
        more: list[tuple[Plain, list[Any] | None]] = []
        for schemas, unlisted in cases:
            for name in able:
                held = {"required": [name], "properties": {name: value_schema}, **_OPEN}
                more.append(([*schemas, held], unlisted))
            if unlisted is None:
                more.append((schemas, [name_schema, value_schema]))
            else:
                document.leave_out(plain[0], "more than one 'not' of unlisted properties")
        cases = more
        if len(cases) > MAX_CASES:
            raise UnusableError(
                f"{document.place(plain[0])}: its 'not' of properties has more than {MAX_CASES} "
                "cases, the limit of this server"
            )
    return cases


def _is_named(document: SchemaDocument, name: str, schema: Schema) -> bool:
    """Return True if a name satisfies the first schema of a `HAS` pair."""
    if "not" in schema:
        return document.wide or not document.is_valid(name, schema["not"])
    if name in schema.get(NOT_ONE_OF, ()):
        return False
    # Wide documents take a name by either reading of a pattern, others by both.
    one, other = (any, all) if document.wide else (all, any)
    if "pattern" in schema and not one(matches(schema["pattern"], name)):
        return False
    return not any(other(matches(pattern, name)) for pattern in schema.get(NOT_PATTERNS, ()))


def _shapes(document: SchemaDocument, plain: Plain, last: list[Any] | None) -> list[Object]:
    """Return the objects of the schemas; `last` is a pair that an unlisted property satisfies."""
    names = list(dict.fromkeys(name for item in plain for name in item.get("properties", ())))
    required = list(dict.fromkeys(name for item in plain for name in item.get("required", ())))
    listed = []
    for name in dict.fromkeys([*names, *required]):
        node = Node.of(*(part for item in plain for part in _of_name(item, name)))
        must = name in required
        if False in node.schemas or not _may_be_name(document, plain, name):
            if must:
                return []
            continue
        listed.append(Property(name, node, must))
    others = _others(document, plain, {*names, *required})
    least = max((int(item.get("minProperties", 0)) for item in plain), default=0)
    most = [int(item["maxProperties"]) for item in plain if "maxProperties" in item]
    if least > len(listed) + bool(others):
        if not others:
            return []
        document.leave_out(
            plain[0],
            f"'minProperties' of {least} cannot be counted among unlisted names; list at least "
            f"{least - 1} properties, or leave it out",
        )
        least = 0
    shape = Object(tuple(listed), tuple(others), least, min(most, default=None), document.open)
    if last is None:
        return [shape]
    ends = [(Node.of(*name.schemas, last[0]), Node.of(*value.schemas, last[1]))
            for name, value in others]  # fmt: skip
    return [replace(shape, last=pair) for pair in ends if False not in pair[1].schemas]


def _of_name(schema: Schema, name: str) -> list[Any]:
    """Return the schemas of the property in one schema.

    If Python's `re` and ECMA-262 differ about a pattern, both readings apply.
    """
    found = [schema["properties"][name]] if name in schema.get("properties", ()) else []
    surely = bool(found)
    for pattern, inner in schema.get("patternProperties", {}).items():
        python, ecma = matches(pattern, name)
        if python or ecma:
            found.append(inner)
        surely |= python and ecma
    return found if surely else [*found, schema.get("additionalProperties", True)]


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
    found, followed = [], []
    for pattern in patterns:
        try:
            matching(pattern)
        except InexactError as error:
            document.leave_out(plain[0], error)
            continue
        followed.append(pattern)
        values = [part for item in plain for part in _of_pattern(item, pattern)]
        found.append((Node.of(*names, {"pattern": pattern}), Node.of(*values)))
    lists = any(item.get("properties") or item.get("patternProperties") for item in own)
    open_ = document.open or any("additionalProperties" in item for item in own)
    if open_ or not lists:
        values = [item.get("additionalProperties", True) for item in plain]
        # A name may match a pattern that no grammar follows, whose schema then applies as well.
        values += [
            inner
            for item in plain
            for pattern, inner in item.get("patternProperties", {}).items()
            if pattern not in followed
        ]
        apart = [{NOT_PATTERNS: followed}] if followed else []
        found.append((Node.of(*names, *apart), Node.of(*values)))
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
