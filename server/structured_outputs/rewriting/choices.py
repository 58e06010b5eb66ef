"""Combining keywords of a schema as choices: lists of schemas of which one applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from server.structured_outputs.rewriting.document import (
    NEGATIVE,
    NOT_TYPES,
    SILENT,
    InexactError,
    Node,
    SchemaDocument,
)
from server.structured_outputs.rewriting.drafts import with_dependencies
from server.structured_outputs.rewriting.negation import (
    VALUE_TYPES,
    absent,
    negations,
    says_nothing_of,
)
from server.structured_outputs.schema_walk import Schema

Choice = list[Any]
"""A list of schemas of which one applies."""
Plain = list[Schema]
"""Schemas without combinations that apply together."""
IsEmpty = Callable[[Node], bool]
"""Returns True if no value can satisfy the node."""

_NO_OBJECT: Schema = {"type": [name for name in VALUE_TYPES if name != "object"]}


def choices(
    document: SchemaDocument, schema: Schema, plain: Plain, is_empty: IsEmpty
) -> list[Choice]:
    """Return the choices of a schema that applies together with the `plain` ones."""
    found: list[Choice] = []
    if "$ref" in schema:
        found.append([document.target(schema)])
    found += [[item] for item in schema.get("allOf", ())]
    if "oneOf" in schema:
        found.append(_one_of(document, schema, plain, is_empty))
    for keyword, rule in _RULES.items():
        if keyword in schema:
            try:
                found += rule(document, schema)
            except InexactError as error:
                document.leave_out(schema, error)
    return found


def _one_of(document: SchemaDocument, schema: Schema, plain: Plain, is_empty: IsEmpty) -> Choice:
    """Return each branch without the values that another branch allows."""
    branches = schema["oneOf"]
    if document.wide:
        return list(branches)
    found: Choice = []
    for index, branch in enumerate(branches):
        parts: list[Any] = [branch]
        for place, other in enumerate(branches):
            if place == index:
                continue
            shared = _shared_types(branch, other, plain, is_empty)
            free = {kind for kind in shared if says_nothing_of(document, other, kind)}
            if free:
                parts.append({NOT_TYPES: sorted(free)})
            if shared <= free:
                continue
            try:
                negations(document, other)
            except InexactError as error:
                document.leave_out(
                    schema,
                    f"'oneOf': branch {index} may hold together with branch {place}, and {error}; "
                    "use 'anyOf', or a 'const' that tells them apart",
                )
                return list(branches)
            parts.append({"not": other})
        found.append({"allOf": parts})
    return found


def _shared_types(branch: Any, other: Any, plain: Plain, is_empty: IsEmpty) -> set[str]:
    """Return the types of the values that may satisfy both branches and `plain`."""
    if is_empty(Node.of(branch, other, *plain)):
        return set()
    return {
        kind for kind in VALUE_TYPES if not is_empty(Node.of(branch, other, *plain, {"type": kind}))
    }


def _any_of(_document: SchemaDocument, schema: Schema) -> list[Choice]:
    return [schema["anyOf"]]


def _not(document: SchemaDocument, schema: Schema) -> list[Choice]:
    return [[{SILENT: item} for item in negations(document, schema["not"])]]


def _if(document: SchemaDocument, schema: Schema) -> list[Choice]:
    condition = schema["if"]
    then, otherwise = schema.get("then", True), schema.get("else", True)
    if then is True and otherwise is True:
        return []
    return [
        [
            {"allOf": [condition, then]},
            *({"allOf": [{SILENT: item}, otherwise]} for item in negations(document, condition)),
        ]
    ]


def _dependent_required(_document: SchemaDocument, schema: Schema) -> list[Choice]:
    return [
        [_NO_OBJECT, absent(name), {"type": "object", "required": [name, *others], NEGATIVE: True}]
        for name, others in schema["dependentRequired"].items()
        if others
    ]


def _dependent_schemas(_document: SchemaDocument, schema: Schema) -> list[Choice]:
    return [
        [_NO_OBJECT, absent(name), {"type": "object", "required": [name], "allOf": [inner]}]
        for name, inner in schema["dependentSchemas"].items()
    ]


def _dependencies(document: SchemaDocument, schema: Schema) -> list[Choice]:
    # Drafts since 2019-09 lack this keyword; it is common in schemas all the same.
    if document.wide or not isinstance(schema["dependencies"], dict):
        return []
    today = with_dependencies({"dependencies": schema["dependencies"]})
    return [[{key: value}] for key, value in today.items()]


_RULES: dict[str, Callable[[SchemaDocument, Schema], list[Choice]]] = {
    "anyOf": _any_of,
    "not": _not,
    "if": _if,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "dependencies": _dependencies,
}
