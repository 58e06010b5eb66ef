"""A JSON schema as its draft reads it: keywords in the form of 2020-12, and where references lead.

Nothing is retrieved: a reference leads into the schema, by a JSON pointer, an `$id` or an anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from server.structured_outputs.constraint import UnusableError

Schema = dict[str, Any]

Steps = tuple[str | int, ...]
"""Keys from a schema to a part of it."""

_ONE = frozenset(
    "not if then else additionalProperties unevaluatedProperties propertyNames items "
    "additionalItems unevaluatedItems contains".split()
)
_MANY = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_NAMED = frozenset(
    (
        "dependentSchemas",
        "dependencies",
        "properties",
        "patternProperties",
        "$defs",
        "definitions",
    )
)


def names_within(root: Any) -> set[str]:
    """Return the keys of all objects in a JSON value; a superset of a schema's keywords."""
    names: set[str] = set()
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            names.update(value)
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    return names


def every_schema(root: Any) -> Iterator[tuple[str, Schema]]:
    """Yield the path and the schema of each schema object in the document, once."""
    stack: list[tuple[str, Any]] = [("$", root)]
    while stack:
        path, schema = stack.pop()
        if isinstance(schema, dict):
            yield path, schema
            stack += [(_joined(path, steps), item) for steps, item in children(schema)]


def children(schema: Schema) -> Iterator[tuple[Steps, Schema]]:
    """Yield the schemas directly in a schema that are objects, each with its keys."""
    for key, value in schema.items():
        parts: Iterable[tuple[Steps, Any]] = ()
        if isinstance(value, dict):
            if key in _NAMED:
                parts = (((key, name), item) for name, item in value.items())
            elif key in _ONE:
                parts = [((key,), value)]
        elif isinstance(value, list) and key in _MANY:
            parts = (((key, index), item) for index, item in enumerate(value))
        yield from ((steps, item) for steps, item in parts if isinstance(item, dict))


def _joined(path: str, steps: Steps) -> str:
    if len(steps) == 1:
        return f"{path}.{steps[0]}"
    key, inner = steps
    return f"{path}.{key}[{inner}]" if isinstance(inner, int) else f"{path}.{key}.{inner}"


def followed(here: Any, steps: Iterable[str]) -> tuple[Steps, Any] | None:
    """Return the keys along the steps of a JSON pointer (RFC 6901), and the value there.

    None if there is no value.
    """
    keys: list[str | int] = []
    for step in steps:
        key: str | int = step.replace("~1", "/").replace("~0", "~")
        if isinstance(here, list) and step.isdecimal() and int(step) < len(here):
            key = int(step)
        elif not isinstance(here, dict) or key not in here:
            return None
        keys.append(key)
        here = here[key]
    return tuple(keys), here


def resolve(root: Any, ref: object, path: str) -> Any:
    """Return the target of a reference. Raises `UnusableError` if it is not in the document."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise UnusableError(
            f"{path}: $ref must be '#' or start with '#/', because only references into the schema "
            f"itself are followed, got {ref!r}"
        )
    found = followed(root, map(unquote, ref.split("/")[1:]))
    if found is None:
        raise UnusableError(f"{path}: $ref {ref!r} leads nowhere")
    here = found[1]
    if not isinstance(here, dict | bool):
        raise UnusableError(f"{path}: $ref {ref!r} leads to something that is no schema")
    return here


TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_OLDER = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019}
"""Drafts by a part of `$schema`; any other is 2020-12."""
_LATEST = 2020
_SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    "if": 7,
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 2019),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), 2019),
    "prefixItems": 2020,
}
_DYNAMIC = ("$dynamicRef", "$recursiveRef")


class Node(NamedTuple):
    """A subschema with its place; `names` are the keywords as written, where they differ."""

    steps: Steps
    schema: Schema | bool
    names: dict[str, tuple[str, ...]] = {}  # noqa: RUF012 (never changed)


def pointer(steps: Steps) -> str:
    """Return the JSON pointer (RFC 6901) of a place, as a fragment."""
    return "#" + "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


class SchemaDocument:
    """One schema. Raises `UnusableError` for a malformed part, naming its place."""

    def __init__(self, root: Any) -> None:
        self.left_out: list[str] = []
        """A line for each part that is not followed."""
        self._root = root
        named = root.get("$schema") if isinstance(root, dict) else None
        older = (n for part, n in _OLDER.items() if isinstance(named, str) and part in named)
        self._draft = next(older, _LATEST)
        if self._draft == 3:
            raise UnusableError("#: '$schema' names draft 3, which is not supported")
        self._nodes: dict[Steps, Node] = {}
        self._bases: dict[Steps, str] = {(): ""}
        self._places: dict[str, Steps] = {"": ()}
        self._anchors: dict[tuple[str, str], Steps] = {}
        if isinstance(root, dict) and not names_within(root).isdisjoint(("$id", "id", "$anchor")):
            self._find_names(root)

    def root(self) -> Node:
        return self._node((), self._root)

    def child(self, node: Node, keyword: str, step: str | int | None = None) -> Node:
        """Return a subschema of a keyword: the only one, or that of a name or index."""
        assert isinstance(node.schema, dict)
        value = node.schema[keyword] if step is None else node.schema[keyword][step]
        where = node.names.get(keyword, (keyword,))
        return self._node((*node.steps, *where, *(() if step is None else (step,))), value)

    def children(self, node: Node, keyword: str) -> list[Node]:
        """Return the subschemas of a keyword with a list; none without the keyword."""
        assert isinstance(node.schema, dict)
        return [self.child(node, keyword, i) for i in range(len(node.schema.get(keyword, ())))]

    def named(self, node: Node, keyword: str) -> dict[str, Node]:
        """Return the subschemas of a keyword with names; none without the keyword."""
        assert isinstance(node.schema, dict)
        return {name: self.child(node, keyword, name) for name in node.schema.get(keyword, ())}

    def target(self, node: Node) -> Node:
        """Return the schema to which the reference of a schema leads."""
        assert isinstance(node.schema, dict)
        ref = node.schema["$ref"]
        base = next(
            self._bases[node.steps[:end]]
            for end in range(len(node.steps), -1, -1)
            if node.steps[:end] in self._bases
        )
        uri, fragment = urldefrag(_uri(base, ref))
        fragment = unquote(fragment)
        place = f"{pointer(node.steps)}: $ref {ref!r}"
        if uri not in self._places:
            raise UnusableError(
                f"{place} leads to another document, because only references into the schema "
                "itself are followed; put its target into '$defs'"
            )
        if (uri, fragment) in self._anchors:
            steps = self._anchors[uri, fragment]
            return self._node(steps, _at(self._root, steps))
        start = self._places[uri]
        found = followed(_at(self._root, start), fragment.split("/")[1:])
        if found is None or (fragment and not fragment.startswith("/")):
            raise UnusableError(f"{place} leads nowhere")
        if not isinstance(found[1], dict | bool):
            raise UnusableError(f"{place} leads to something that is no schema")
        return self._node((*start, *found[0]), found[1])

    def _find_names(self, root: Schema) -> None:
        stack: list[tuple[Steps, Schema, str]] = [((), root, "")]
        while stack:
            steps, schema, base = stack.pop()
            name = schema.get("id" if self._draft == 4 else "$id")
            if isinstance(name, str) and not ("$ref" in schema and self._draft <= 7):
                if name.startswith("#"):
                    self._anchors[base, name[1:]] = steps
                else:
                    base = urldefrag(_uri(base, name)).url
                    self._places[base] = self._places.get(base, steps)
            if isinstance(anchor := schema.get("$anchor"), str):
                self._anchors[base, anchor] = steps
            self._bases[steps] = base
            stack += [((*steps, *more), inner, base) for more, inner in children(schema)]

    def _node(self, steps: Steps, value: Any) -> Node:
        known = self._nodes.get(steps)
        if known is None:
            known = self._nodes[steps] = self._read(steps, value)
        return known

    def _read(self, steps: Steps, value: Any) -> Node:
        if isinstance(value, bool):
            return Node(steps, value)
        schema, names = self._modern(steps, value)
        for keyword, given in schema.items():
            fits = _FORMS.get(keyword)
            if fits is not None and not fits(given):
                raise UnusableError(
                    f"{pointer(steps)}: the value of {names.get(keyword, (keyword,))[0]!r} is "
                    f"malformed: {str(given)[:80]}"
                )
        return Node(steps, schema, names)

    def _modern(self, steps: Steps, given: Schema) -> tuple[Schema, dict[str, tuple[str, ...]]]:
        """Return the keywords in the form of 2020-12, and those that have another name here.

        In drafts up to 7, keywords beside `$ref` are ignored (draft-07 Core, 8.3).
        """
        draft = self._draft
        if draft <= 7 and "$ref" in given:
            return {"$ref": given["$ref"]}, {}
        for keyword, since in _SINCE.items():
            if since > draft and keyword in given:
                self.left_out.append(
                    f"{pointer(steps)}: {keyword!r} is no keyword of the draft that '$schema' "
                    "names; name a newer one or leave '$schema' out"
                )
                given = {key: value for key, value in given.items() if key != keyword}
        for keyword in _DYNAMIC:
            if keyword in given:
                self.left_out.append(f"{pointer(steps)}: {keyword!r} is not supported; use '$ref'")
        return _translated(given)


def _translated(given: Schema) -> tuple[Schema, dict[str, tuple[str, ...]]]:
    schema, names = dict(given), dict[str, tuple[str, ...]]()
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        names["prefixItems"] = ("items",)
        if "additionalItems" in schema:
            schema["items"] = schema.pop("additionalItems")
            names["items"] = ("additionalItems",)
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(exclusive), bool):
            excludes = schema.pop(exclusive)
            if excludes and bound in schema:
                schema[exclusive] = schema.pop(bound)
    # Newer drafts have it no more, but schemas have.
    if isinstance(parts := schema.pop("dependencies", {}), dict):
        for keyword, kind in (("dependentRequired", list), ("dependentSchemas", dict | bool)):
            found = {name: value for name, value in parts.items() if isinstance(value, kind)}
            if found and keyword not in schema:
                schema[keyword] = found
                names[keyword] = ("dependencies",)
    return schema, names


def _uri(base: str, ref: str) -> str:
    """Return the URI of a reference; Python's `urljoin` keeps no base of the scheme `urn`."""
    if not ref:
        return base
    if ref.startswith("#"):
        return urldefrag(base).url + ref
    return ref if urlsplit(ref).scheme else urljoin(base, ref)


def _at(root: Any, steps: Steps) -> Any:
    for step in steps:
        root = root[step]
    return root


_Fits = Callable[[Any], bool]


def _is(kind: Any) -> _Fits:
    return lambda value: isinstance(value, kind)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_type(value: Any) -> bool:
    return isinstance(value, str) and value in TYPES


def _are(fits: _Fits, *, some: bool = False) -> _Fits:
    return lambda value: (
        isinstance(value, list) and all(map(fits, value)) and (len(value) > 0 or not some)
    )


def _named(fits: _Fits) -> _Fits:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


_is_text, _is_schema = _is(str), _is(dict | bool)
_FORMS: dict[str, _Fits] = {
    "type": lambda value: _is_type(value) or _are(_is_type, some=True)(value),
    "enum": _is(list),
    "uniqueItems": _is(bool),
    **dict.fromkeys(("pattern", "format", "$ref"), _is_text),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    "multipleOf": lambda value: _is_number(value) and value > 0,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _is_count),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), _is_count),
    "required": _are(_is_text),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _are(_is_schema, some=True)),
    "prefixItems": _are(_is_schema),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), _named(_is_schema)),
    "dependentRequired": _named(_are(_is_text)),
    **dict.fromkeys(("items", "additionalProperties", "propertyNames", "contains"), _is_schema),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems", "not"), _is_schema),
    **dict.fromkeys(("if", "then", "else"), _is_schema),
}
"""By keyword: whether a value has its form."""
