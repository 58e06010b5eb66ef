"""Constraints of a request on its answer, their places in the body, and their limits.

Pure functions. Values of the wrong JSON type are skipped here; the request models refuse them.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.errors import InvalidValueError, MissingFieldError, UnsupportedFieldError
from server.tools import ToolChoice, get_field
from server.wire import Endpoint, JsonObject

BACKEND = "xgrammar"
"""vLLM's grammar backend, set by `rbln_backend.platform`; most constraints go to llguidance."""


class ConstraintKind(enum.Enum):
    """Kind of a constraint; the value is the field of `structured_outputs`."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint; `param` is its place in the request.

    `text` is JSON for a schema, a choice or a structural tag. Without `exact`, keywords that the
    grammar cannot express are ignored. A `derived` one was made by vLLM from parts that were
    inspected already. The schema of a `tagged` one goes to xgrammar unchanged, as part of a
    structural tag. `shares` is the number of its schemas, each of which adds the
    processor time of one.
    """

    kind: ConstraintKind
    text: str
    param: str
    exact: bool = True
    derived: bool = False
    tagged: bool = False
    shares: int = 1


class UnusableError(ValueError):
    """A constraint cannot be used; the message has the reason and the place in it."""


def job_key(constraints: Sequence[Constraint], *, exact: bool = True) -> bytes:
    """Return the cache key of constraints; without `exact`, as if none of them were exact."""
    digest = hashlib.sha256()
    for item in constraints:
        head = f"{item.kind.value} {item.exact and exact} {item.tagged} {len(item.text)}\n"
        digest.update(head.encode() + item.text.encode(errors="surrogatepass"))
    return digest.digest()


ANY_OBJECT = '{"type": "object"}'
"""Schema of `json_object`."""

GENERATING = frozenset((Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.RESPONSES, Endpoint.MESSAGES))
"""Endpoints whose answers constraints guide."""
_FORMAT_HOLDERS = {Endpoint.RESPONSES: "text", Endpoint.MESSAGES: "output_config"}
"""Fields with the format of an answer in the APIs that have no `response_format`."""
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_COMPACT = "start the server with --structured-outputs-config.disable_any_whitespace true"
TOOLS = "tools"
GUIDES = (*_KINDS, TOOLS)
"""Kinds of guidance; values of a metric's label."""
_WITHOUT_EFFECT = {
    "disable_any_whitespace": _COMPACT,
    "disable_additional_properties": "set additionalProperties in the schema",
    "whitespace_pattern": f"{_COMPACT} for none at all",
}
"""Options of `structured_outputs` that the backend would ignore, with their alternatives."""

_TYPING_KEYS = frozenset(("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"))
"""Keywords that determine the type of a value."""

_ANNOTATIONS = frozenset(("$schema", "$id", "$comment", "title", "description"))
"""Keywords that say nothing of a value."""


def get_constraints(
    endpoint: Endpoint, fields: JsonObject, *, rewrites_tools: bool = True
) -> list[list[Constraint]]:
    """Return the constraints of the answer; each list is compiled together, each tool alone.

    `rewrites_tools`: grammars of calls have rewritten schemas. Raises `MissingFieldError`,
    `InvalidValueError` or `UnsupportedFieldError`.
    """
    if endpoint not in GENERATING:
        return []
    found: list[Constraint] = []
    if (value := fields.get("structured_outputs")) is not None:
        found += output_constraint(value, "structured_outputs")
    holder = _FORMAT_HOLDERS.get(endpoint)
    path = "response_format" if holder is None else f"{holder}.format"
    value = fields.get(path) if holder is None else get_field(fields.get(holder), "format")
    if endpoint is Endpoint.MESSAGES and isinstance(value, dict):
        value = {"type": "json_schema", **value}
    if value is not None:
        found += format_constraint(value, path, nested=holder is None)
    if len(found) > 1:
        raise InvalidValueError(
            f"Only one of '{found[0].param}' and '{found[1].param}' can guide an answer.",
            param=found[1].param,
        )
    jobs = [found] if found else []
    if fields.get("tools"):
        jobs += [[tool] for tool in _tools(endpoint, fields, tagged=not rewrites_tools)]
    return jobs


def object_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object whatever it leaves out.

    A tool without parameters has an object without members.
    """
    given = dict(parameters or {})
    if given.keys() <= _ANNOTATIONS:
        return {**given, "type": "object", "properties": {}, "additionalProperties": False}
    if isinstance(given.get("type"), list):
        return {**given, "type": "object"}
    return given if _TYPING_KEYS & given.keys() else {"type": "object", **given}


def get_kind(jobs: list[list[Constraint]]) -> str:
    """Return the kind of guidance, one of `GUIDES`, of an answer with these constraints."""
    first = jobs[0][0]
    if first.param.startswith(f"{TOOLS}["):
        return TOOLS
    if first.kind is ConstraintKind.JSON and first.text == ANY_OBJECT:
        return "json_object"
    return first.kind.value


def output_constraint(value: object, name: str) -> list[Constraint]:
    if not isinstance(value, dict):
        return []
    for option, instead in _WITHOUT_EFFECT.items():
        if value.get(option):
            path = f"{name}.{option}"
            raise UnsupportedFieldError(
                f"'{path}' has no effect with the grammar backend {BACKEND}; {instead}.", param=path
            )
    given = [kind for kind in _KINDS if value.get(kind) is not None]
    if len(given) != 1:
        raise InvalidValueError(
            f"'{name}' must have exactly one of {', '.join(_KINDS)}; it has "
            f"{' and '.join(given) or 'none'}.",
            param=name,
        )
    return kind_constraint(given[0], value[given[0]], f"{name}.{given[0]}")


def kind_constraint(kind: str, value: Any, path: str) -> list[Constraint]:
    """Return the constraint of one field of `structured_outputs`; none for a wrong type."""
    if kind == "json_object":
        if value is False:
            raise InvalidValueError(
                f"'{path}' must be true; leave it out for an answer that nothing guides.",
                param=path,
            )
        return [Constraint(ConstraintKind.JSON, ANY_OBJECT, path)]
    if isinstance(value, str):
        fits = kind != "choice"
    elif isinstance(value, list):
        fits = kind == "choice" and all(isinstance(item, str) for item in value)
    else:
        # The validation route accepts objects too, not only their JSON text.
        fits = kind in ("json", "structural_tag") and isinstance(value, dict)
        fits |= kind == "json" and isinstance(value, bool)
    if not fits:
        return []
    text = value if isinstance(value, str) else json.dumps(value)
    return [Constraint(ConstraintKind(kind), text, path)]


def format_constraint(value: object, name: str, *, nested: bool = True) -> list[Constraint]:
    """Return the constraint of a `response_format`; `nested`: its schema is in `json_schema`."""
    if not isinstance(value, dict):
        return []
    kind = value.get("type")
    if kind == "json_object":
        return [Constraint(ConstraintKind.JSON, ANY_OBJECT, name)]
    if kind == "structural_tag" and nested:
        return [Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(value), name)]
    if kind != "json_schema":
        return []
    inner: Any = value
    if nested:
        name = f"{name}.json_schema"
        inner = value.get("json_schema")
        if inner is None:
            raise MissingFieldError(f"The field '{name}' is missing.", param=name)
        if not isinstance(inner, dict):
            return []
    path = f"{name}.schema"
    schema = inner.get("schema")
    if schema is None:
        raise MissingFieldError(f"The field '{path}' is missing.", param=path)
    return [
        Constraint(ConstraintKind.JSON, json.dumps(schema), path, inner.get("strict") is not False)
    ]


def _tools(endpoint: Endpoint, fields: JsonObject, *, tagged: bool) -> list[Constraint]:
    """Return the parameter schemas of the tools whose calls are guided."""
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return []
    name = "input_schema" if endpoint is Endpoint.MESSAGES else "parameters"
    choice = ToolChoice.of(fields.get("tool_choice"))
    found, any_strict = [], False
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if endpoint.chats:
            tool, path = get_field(tool, "function"), f"{path}.function"
        if not choice.allows(get_field(tool, "name")):
            continue
        strict = get_field(tool, "strict") is True
        any_strict |= strict
        schema = get_field(tool, name)
        if isinstance(schema, dict):
            text = json.dumps(object_schema(schema))
            found.append(
                Constraint(ConstraintKind.JSON, text, f"{path}.{name}", strict, tagged=tagged)
            )
    # With `auto`, calls are guided if a tool is strict or if only some tools are allowed.
    return found if choice.forces or choice.listed or any_strict else []
