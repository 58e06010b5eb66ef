"""A schema as a union of plain ones: no combination, condition or reference is left in them.

References and `allOf` add to what applies; `anyOf`, `oneOf`, `if` and the dependencies of
properties are choices, which are multiplied out. A choice that contradicts itself is dropped on
the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.rewriting.document import NEGATIVE, Document, InexactError, Node
from server.structured_outputs.rewriting.negation import TYPES, absent, negations, without
from server.structured_outputs.schema_walk import Schema

MAX_ALTERNATIVES = 256
"""How many plain schemas one place may come to."""

Plain = list[Schema]
"""Schemas without combinations that apply together."""
Excludes = Callable[[Any, Any], bool]
"""Whether no value satisfies both schemas."""

_COMBINING = frozenset(
    (
        *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
        *("dependentRequired", "dependentSchemas", "unevaluatedProperties"),
    )
)
_REFUSED = {
    "$dynamicRef": "write '$ref' instead",
    "$recursiveRef": "write '$ref' instead",
    "unevaluatedItems": "write 'items' beside 'prefixItems' instead",
}


def alternatives(document: Document, node: Node, excludes: Excludes) -> list[Plain]:
    """Return the plain schemas whose union the node is.

    Raises `UnusableError` if there are too many.
    """
    found: list[Plain] = []
    for plain in _expand(document, list(node.schemas), [], excludes):
        found.append(plain)
        if len(found) > MAX_ALTERNATIVES:
            place = document.place(node.schemas[0])
            raise UnusableError(
                f"{place}: its combinations come to more than {MAX_ALTERNATIVES} alternatives, "
                "the limit of this server"
            )
    return found


def _expand(
    document: Document, waiting: list[Any], plain: Plain, excludes: Excludes
) -> Iterator[Plain]:
    """Yield what `plain` comes to with the schemas that wait."""
    while waiting and waiting[0] is True:
        waiting = waiting[1:]
    if not waiting:
        yield plain
        return
    schema, rest = waiting[0], waiting[1:]
    if schema is False:
        return
    own = {key: value for key, value in schema.items() if key not in _COMBINING}
    if own:
        plain = [*plain, own]
        if _contradict(plain):
            return
        for keyword, instead in _REFUSED.items():
            if keyword in schema and schema[keyword] is not True:
                document.leave_out(schema, f"{keyword!r} is not supported; {instead}")
    if schema.get("unevaluatedProperties", True) is not True:
        yield from _closed(document, schema, rest, plain, excludes)
        return
    yield from _choose(document, _choices(document, schema, excludes), rest, plain, excludes)


def _choose(
    document: Document, choices: list[list[Any]], rest: list[Any], plain: Plain, excludes: Excludes
) -> Iterator[Plain]:
    """Yield each way through the choices, of which every one is a list of schemas."""
    if not choices:
        yield from _expand(document, rest, plain, excludes)
        return
    for option in choices[0]:
        for chosen in _expand(document, [option], plain, excludes):
            yield from _choose(document, choices[1:], rest, chosen, excludes)


def _choices(document: Document, schema: Schema, excludes: Excludes) -> list[list[Any]]:
    found: list[list[Any]] = []
    if "$ref" in schema:
        found.append([document.target(schema)])
    found += [[item] for item in schema.get("allOf", ())]
    for keyword, rule in _RULES.items():
        if keyword in schema:
            try:
                found += rule(document, schema, excludes)
            except InexactError as error:
                document.leave_out(schema, error)
    return found


def _any_of(_document: Document, schema: Schema, _excludes: Excludes) -> list[list[Any]]:
    return [schema["anyOf"]]


def _one_of(document: Document, schema: Schema, excludes: Excludes) -> list[list[Any]]:
    """Each branch without what another allows too."""
    branches, found = schema["oneOf"], []
    for index, branch in enumerate(branches):
        others = [item for item in branches if item is not branch and not excludes(branch, item)]
        for other in others:
            try:
                negations(document, other)
            except InexactError as error:
                document.leave_out(
                    schema,
                    f"'oneOf': branch {index} may hold together with branch "
                    f"{branches.index(other)}, and {error}; use 'anyOf', or a 'const' that tells "
                    "them apart",
                )
                return [branches]
        found.append({"allOf": [branch, *({"not": other} for other in others)]})
    return [found]


def _not(document: Document, schema: Schema, _excludes: Excludes) -> list[list[Any]]:
    return [negations(document, schema["not"])]


def _if(document: Document, schema: Schema, _excludes: Excludes) -> list[list[Any]]:
    condition = schema["if"]
    then, otherwise = schema.get("then", True), schema.get("else", True)
    if then is True and otherwise is True:
        return []
    return [
        [
            {"allOf": [condition, then]},
            {"allOf": [without(document, condition), otherwise]},
        ]
    ]


_NO_OBJECT: Schema = {"type": [name for name in TYPES if name != "object"]}


def _dependent_required(
    _document: Document, schema: Schema, _excludes: Excludes
) -> list[list[Any]]:
    return [
        [_NO_OBJECT, absent(name), {"type": "object", "required": [name, *others], NEGATIVE: True}]
        for name, others in schema["dependentRequired"].items()
        if others
    ]


def _dependent_schemas(_document: Document, schema: Schema, _excludes: Excludes) -> list[list[Any]]:
    return [
        [_NO_OBJECT, absent(name), {"type": "object", "required": [name], "allOf": [inner]}]
        for name, inner in schema["dependentSchemas"].items()
    ]


_RULES: dict[str, Callable[[Document, Schema, Excludes], list[list[Any]]]] = {
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
}


def _closed(
    document: Document, schema: Schema, rest: list[Any], plain: Plain, excludes: Excludes
) -> Iterator[Plain]:
    """Yield alternatives of an object all of whose properties its own schemas must know."""
    if schema["unevaluatedProperties"] is not False:
        document.leave_out(
            schema, "'unevaluatedProperties' may be true or false alone; list the properties"
        )
    open_ = {key: value for key, value in schema.items() if key != "unevaluatedProperties"}
    for own in _expand(document, [open_], [], excludes):
        known = [item for item in own if NEGATIVE not in item]
        if any("additionalProperties" in item for item in known):
            lid: Schema = {}
        else:
            lid = {
                "properties": {n: True for item in known for n in item.get("properties", ())},
                "patternProperties": {
                    p: True for item in known for p in item.get("patternProperties", ())
                },
                "additionalProperties": False,
            }
        whole = [*plain, *own, *([lid] if lid else [])]
        if not _contradict(whole):
            yield from _expand(document, rest, whole, excludes)


def _contradict(plain: Plain) -> bool:
    """Whether the types or fixed values of the schemas leave nothing; a glance, no proof."""
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
