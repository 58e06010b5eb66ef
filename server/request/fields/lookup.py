"""Queries of the tables of fields. Pure functions."""

from __future__ import annotations

from functools import cache

from server.request.fields.field import Field, FieldAction, FieldKind, PromptRole
from server.request.fields.shared import SHARED
from server.request.fields.tables import FIELDS
from server.wire.endpoint import Endpoint, JsonObject


@cache
def fields_by_name(endpoint: Endpoint) -> dict[str, Field]:
    """Return the fields of a body by name, the shared ones first, in the order of their checks."""
    rows = {row.path: row for row in FIELDS[endpoint] if not {"[", "."} & {*row.path}}
    return {**{row.path: row for row in SHARED}, **rows}


@cache
def fields_of_kind(endpoint: Endpoint, kind: FieldKind) -> tuple[str, ...]:
    """Return the paths of the fields of a kind."""
    return tuple(path for path, row in fields_by_name(endpoint).items() if row.kind is kind)


def kind_of_field(endpoint: Endpoint, name: str) -> FieldKind:
    """Return the kind of a field; OPTIONS for one that is in no table."""
    row = fields_by_name(endpoint).get(name)
    return FieldKind.OPTIONS if row is None else row.kind


def plain_fields(endpoint: Endpoint, fields: JsonObject) -> JsonObject:
    """Return the fields of one value or one object of options: no prompts, messages or tools."""
    return {name: value for name, value in fields.items() if kind_of_field(endpoint, name).is_plain}


@cache
def prompt_fields(endpoint: Endpoint) -> tuple[str, ...]:
    """Return the names of the fields with prompts, those with an answer for each prompt first."""
    rows = [row for row in fields_by_name(endpoint).values() if row.prompt is not None]
    return tuple(r.path for r in sorted(rows, key=lambda r: r.prompt is PromptRole.CONTEXT))


def error_field(endpoint: Endpoint, body: JsonObject) -> str | None:
    """Return the field that errors about a too long prompt name, or None."""
    rows = fields_by_name(endpoint)
    counted = (name for name in prompt_fields(endpoint) if rows[name].prompt is PromptRole.COUNTED)
    return next((name for name in counted if name in body), None)


@cache
def effort_path(endpoint: Endpoint) -> str:
    """Return the path of the effort of thinking, empty for an API without one."""
    return next((row.path for row in FIELDS[endpoint] if row.kind is FieldKind.EFFORT), "")


def obeys(endpoint: Endpoint, name: str) -> bool:
    """Return True if an API documents a field and the server acts on it."""
    row = fields_by_name(endpoint).get(name)
    return row is not None and row.action is FieldAction.OBEYED


def extra_schemas(endpoint: Endpoint) -> dict[str, JsonObject]:
    """Return the JSON schemas of accepted fields that the request model does not have."""
    found: dict[str, JsonObject] = {}
    for name, row in fields_by_name(endpoint).items():
        if row.schema:
            found[name] = {**row.schema, "description": f"{row.why.capitalize()}."}
        elif row.action in (FieldAction.GRANTED, FieldAction.IGNORED):
            found[name] = {"description": f"{row.action.value.capitalize()}: {row.why}."}
        elif row.action is FieldAction.REFUSED and row.same and not row.stays:
            found[name] = {"enum": [*row.same, None]}
    return found


def refused_fields(endpoint: Endpoint) -> frozenset[str]:
    """Return the names of refused fields."""
    rows = fields_by_name(endpoint).items()
    return frozenset(name for name, row in rows if row.action is FieldAction.REFUSED)
