"""Expansion of a schema to a union of plain schemas, without combinations and references.

References and `allOf` add schemas; the other combinations are choices (`choices.py`), which are
multiplied out. Contradictory combinations are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.rewriting.choices import Choice, IsEmpty, Plain, choices
from server.structured_outputs.rewriting.document import NEGATIVE, SILENT, Node, SchemaDocument
from server.structured_outputs.schema_walk import Schema

MAX_ALTERNATIVES = 256
"""Most plain schemas of one node."""

_COMBINING = frozenset(
    (
        *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", SILENT),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
        "unevaluatedItems",
    )
)
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
_REFUSED = {
    "$dynamicRef": "write '$ref' instead",
    "$recursiveRef": "write '$ref' instead",
}


def alternatives(document: SchemaDocument, node: Node, is_empty: IsEmpty) -> list[Plain]:
    """Return the plain schemas whose union the node is; `UnusableError` if there are too many."""
    if all(isinstance(item, dict) and _COMBINING.isdisjoint(item) for item in node.schemas):
        return _uncombined(document, list(node.schemas))
    found: list[Plain] = []
    for plain in _expand(document, list(node.schemas), [], is_empty):
        found.append(plain)
        if len(found) > MAX_ALTERNATIVES:
            place = document.place(node.schemas[0])
            raise UnusableError(
                f"{place}: its combinations have more than {MAX_ALTERNATIVES} alternatives, "
                "the limit of this server"
            )
    return found


def _uncombined(document: SchemaDocument, plain: Plain) -> list[Plain]:
    """Return the only alternative of schemas without combinations, if there is one."""
    if _contradict(plain):
        return []
    for schema in plain:
        _note_refused(document, schema)
    return [plain]


def _expand(
    document: SchemaDocument, waiting: list[Any], plain: Plain, is_empty: IsEmpty
) -> Iterator[Plain]:
    """Yield the alternatives of `plain` together with the `waiting` schemas."""
    while waiting and waiting[0] is True:
        waiting = waiting[1:]
    if not waiting:
        yield plain
        return
    schema, rest = waiting[0], waiting[1:]
    if schema is False:
        return
    if not document.wide and any(schema.get(key, True) is not True for key in _UNEVALUATED):
        yield from _closed(document, schema, rest, plain, is_empty)
        return
    own = {key: value for key, value in schema.items() if key not in _COMBINING}
    if own:
        plain = [*plain, own]
        if _contradict(plain):
            return
        _note_refused(document, schema)
    if SILENT in schema:
        yield from _silenced(document, schema[SILENT], rest, plain, is_empty)
    else:
        options = choices(document, schema, plain, is_empty)
        yield from _choose(document, options, rest, plain, is_empty)


def _note_refused(document: SchemaDocument, schema: Schema) -> None:
    for keyword, instead in _REFUSED.items():
        if keyword in schema and schema[keyword] is not True:
            document.leave_out(schema, f"{keyword!r} is not supported; {instead}")


def _choose(
    document: SchemaDocument,
    options: list[Choice],
    rest: list[Any],
    plain: Plain,
    is_empty: IsEmpty,
) -> Iterator[Plain]:
    """Yield the alternatives of all combinations of the choices."""
    if not options:
        yield from _expand(document, rest, plain, is_empty)
        return
    for option in options[0]:
        for chosen in _expand(document, [option], plain, is_empty):
            yield from _choose(document, options[1:], rest, chosen, is_empty)


def _silenced(
    document: SchemaDocument, schema: Any, rest: list[Any], plain: Plain, is_empty: IsEmpty
) -> Iterator[Plain]:
    """Yield the alternatives of a `SILENT` schema."""
    for found in _expand(document, [schema], plain, is_empty):
        new = [{**item, NEGATIVE: True} for item in found[len(plain) :]]
        yield from _expand(document, rest, [*plain, *new], is_empty)


def _closed(
    document: SchemaDocument, schema: Schema, rest: list[Any], plain: Plain, is_empty: IsEmpty
) -> Iterator[Plain]:
    """Yield the alternatives of a schema with `unevaluatedProperties` or `unevaluatedItems`."""
    inner = {key: value for key, value in schema.items() if key not in _UNEVALUATED}
    for own in _expand(document, [inner], [], is_empty):
        known = [item for item in own if NEGATIVE not in item]
        rest_of = (_other_properties, "unevaluatedProperties"), (_other_items, "unevaluatedItems")
        lids = [
            find(known, schema[key]) for find, key in rest_of if schema.get(key, True) is not True
        ]
        whole = [
            *plain,
            *own,
            *(lid for lid in lids if lid),
        ]
        if not _contradict(whole):
            yield from _expand(document, rest, whole, is_empty)


def _other_properties(known: Plain, inner: Any) -> Schema:
    """Return the schema of objects whose properties that the known ones leave satisfy `inner`."""
    if any("additionalProperties" in item for item in known):
        return {}
    return {
        "properties": {name: True for item in known for name in item.get("properties", ())},
        "patternProperties": {
            pattern: True for item in known for pattern in item.get("patternProperties", ())
        },
        "additionalProperties": inner,
    }


def _other_items(known: Plain, inner: Any) -> Schema:
    """Return the schema of arrays whose items that the known schemas leave satisfy `inner`."""
    if any("items" in item for item in known):
        return {}
    first = max((len(item.get("prefixItems", ())) for item in known), default=0)
    held = [item["contains"] for item in known if "contains" in item]
    return {
        **({"prefixItems": [True] * first} if first else {}),
        "items": {"anyOf": [*held, inner]} if held else inner,
    }


def _contradict(plain: Plain) -> bool:
    """Return True if types or `const` exclude all values; may miss contradictions."""
    types: set[str] | None = None
    for schema in plain:
        if "type" in schema:
            named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            wide = {*named, "integer"} if "number" in named else set(named)
            types = wide if types is None else types & wide
            if not types:
                return True
    fixed = [schema["const"] for schema in plain if "const" in schema]
    return any(value != fixed[0] for value in fixed[1:])
