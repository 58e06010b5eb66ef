"""Rewrites a JSON schema to an equal one that llguidance follows, or refuses it.

llguidance compiles most keywords itself. The others are expressed by those: a condition or a
dependency as a choice, a `oneOf` as an `anyOf` of branches that exclude each other. What has no
such form is left out with its place and reason, and refused where the schema must be followed
exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.exclusion import (
    ASSERTIONS,
    Exclusion,
    NoNegationError,
    above,
    either,
    get_types,
    matches,
)
from server.structured_outputs.patterns import (
    ANY_TEXT,
    FORMAT_PATTERNS,
    PatternError,
    get_prefix,
    translated,
    without,
)
from server.structured_outputs.schema_document import Node, Schema, SchemaDocument, Steps, pointer

MOST_STEPS = 100_000
"""Work on one schema: subschemas read, compared and written."""
_MOST = 10**15 - 1
"""Size of numbers without bounds; others may have exponents beyond what doubles hold."""
_BOUNDS = frozenset(
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const")
)
FORMATS = frozenset("date time date-time duration email hostname ipv4 ipv6 uuid uri".split())
"""Formats that are followed; all others are annotations."""
_COPIED = ("type", "enum", "const", "minimum", "maximum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_HERE = frozenset(
    ("allOf", "anyOf", "oneOf", "dependentSchemas", "$ref", "if", "not", "then", "else")
)
"""Keywords with schemas of the same value."""
_DEPENDENT = ("dependentRequired", "dependentSchemas")
_MOST_CHOSEN = 64
"""Most properties of which a schema requires or allows one."""


@dataclass(frozen=True, slots=True)
class Normalised:
    """A schema for llguidance; `left_out` has a line for each part that it does not follow."""

    schema: Any
    left_out: tuple[str, ...]


def normalised(schema: Any, *, closed: bool) -> Normalised:
    """Return a schema in the form that llguidance follows.

    `closed`: objects of which properties are listed have no others, unless the schema says so.
    Raises `UnusableError` for a malformed schema, or one that no finite value satisfies.
    """
    try:
        return _Normaliser(SchemaDocument(schema), closed=closed).run()
    except RecursionError:
        raise UnusableError("#: it is nested too deeply") from None


@dataclass(slots=True)
class _Listing:
    """What the schemas of one value say of its properties."""

    names: dict[str, None] = field(default_factory=dict)
    needed: dict[str, None] = field(default_factory=dict)
    """Names that are required, by themselves or with others."""
    patterns: dict[str, None] = field(default_factory=dict)
    lists: bool = False
    """True if a schema has `properties` or `patternProperties`."""
    is_open: bool = False
    """True if a schema allows others than it lists, and says so."""
    excludes: bool = False
    """True if a schema may be followed by properties that it forbids."""
    limits_names: bool = False
    is_typed: bool = False
    has_branches: bool = False

    def add(self, other: _Listing) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) | getattr(other, one.name))


class _Normaliser:
    def __init__(self, document: SchemaDocument, *, closed: bool) -> None:
        self._document = document
        self._closed = closed
        self._exclusion = Exclusion(document, MOST_STEPS, self._part)
        self._listings: dict[Steps, _Listing] = {}
        self._entered: set[Steps] = set()
        self._whole_nodes: set[Steps] = set()
        self._names: dict[tuple[Steps, bool], str] = {}
        self._waiting: list[tuple[str, Node, bool]] = []

    def run(self) -> Normalised:
        root = self._document.root()
        found = self._whole(root)
        if found is False:
            raise UnusableError("#: no value satisfies it")
        definitions: Schema = {}
        while self._waiting:
            name, node, is_whole = self._waiting.pop()
            definitions[name] = self._whole(node) if is_whole else self._part(node)
        _check_finite(found, definitions)
        if definitions:
            found = {**found, "$defs": definitions}
        return Normalised(found, tuple(dict.fromkeys(self._document.left_out)))

    def _leave_out(self, node: Node, keyword: str, reason: str) -> bool:
        """Note a part that is not followed; return the schema that takes its place."""
        written = node.names.get(keyword, (keyword,))[0]
        self._document.left_out.append(f"{pointer(node.steps)}: {written!r} {reason}")
        return True

    def _reference(self, target: Node, *, whole: bool) -> Schema:
        key = target.steps, whole
        if key not in self._names:
            self._names[key] = str(len(self._names))
            self._waiting.append((self._names[key], target, whole))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    # Properties that no schema lists.

    def _whole(self, node: Node, outer: _Listing | None = None) -> Any:
        """Return the schema of all that is said of a value; `outer` is said of it elsewhere."""
        if isinstance(node.schema, bool):
            return node.schema if outer is None else self._limited(node.schema, outer)
        if outer is None:
            if (alone := self._alone(node)) is not None:
                return alone
            self._whole_nodes.add(node.steps)
        lists = [key for key in ("anyOf", "oneOf") if key in node.schema]
        own = self._listing(node, without=lists)
        if outer is not None:
            own.add(outer)
        if len(lists) == 1 and not own.has_branches:
            # Each branch has its own properties.
            return self._part(node, own)
        listing = self._listing(node)
        if outer is not None:
            listing.add(outer)
        return self._limited(self._part(node), listing)

    def _alone(self, node: Node) -> Any:
        """Return the reference of a schema that says nothing else; None for others."""
        assert isinstance(node.schema, dict)
        said = ASSERTIONS & node.schema.keys()
        if said == {"$ref"}:
            # Circles are found on the way.
            self._listing(node)
            return self._reference(self._document.target(node), whole=True)
        if said == {"allOf"} and len(node.schema["allOf"]) == 1:
            return self._whole(self._document.child(node, "allOf", 0))
        return None

    def _limited(self, found: Any, listing: _Listing) -> Any:
        """Return a schema without properties beyond a listing, or with their names in one form.

        llguidance writes names of unlisted properties with any escapes, by which they may be
        listed ones. It writes those of a pattern in one form.
        """
        if found is False or not (listing.lists or listing.excludes):
            return found
        if found is True:
            found = {}
        if found.get("additionalProperties") is False or "object" not in _get_names(found):
            return found
        limit = _exactly(listing)
        limit["properties"] |= dict.fromkeys(listing.needed, True)
        if listing.is_open or not self._closed or not listing.lists:
            if listing.limits_names:
                return found
            # Names that no pattern of the listing matches.
            prefixes = [*map(get_prefix, listing.patterns)]
            known = [prefix for prefix in prefixes if prefix is not None]
            if len(known) == len(prefixes):
                limit["patternProperties"][without((), known) if known else ANY_TEXT] = True
        elif not listing.is_typed:
            limit["type"] = "object"
        if "additionalProperties" in found:
            return {"allOf": [found, limit]}
        for keyword in ("properties", "patternProperties"):
            limit[keyword] = {**limit[keyword], **found.get(keyword, {})}
        # The schema's own properties first, in their order.
        order = [*found.get("properties", ()), *limit["properties"]]
        limit["properties"] = {name: limit["properties"][name] for name in order}
        return {**found, **limit}

    def _listing(self, node: Node, without: Sequence[str] = ()) -> _Listing:
        """Return what all schemas of the value of `node` list, except the keywords `without`."""
        known = self._listings.get(node.steps) if not without else None
        if known is not None:
            return known
        self._exclusion.step()
        if node.steps in self._entered:
            raise UnusableError(f"{pointer(node.steps)}: it refers to itself for the same value")
        self._entered.add(node.steps)
        found = _Listing()
        if isinstance(node.schema, dict):
            self._list(node, node.schema, found, without)
        self._entered.discard(node.steps)
        if not without:
            self._listings[node.steps] = found
        return found

    def _list(self, node: Node, schema: Schema, found: _Listing, without: Sequence[str]) -> None:
        found.lists = not {"properties", "patternProperties"}.isdisjoint(schema)
        found.is_typed = not {"type", "enum", "const"}.isdisjoint(schema)
        found.has_branches = any(
            key in schema and key not in without
            for key in ("anyOf", "oneOf", "if", "dependentSchemas")
        )
        found.excludes = not {"not", "if", *_DEPENDENT}.isdisjoint(schema)
        found.excludes |= "oneOf" in schema and any(map(any, self._overlaps(node)))
        if "propertyNames" in schema:
            found.limits_names = self._names_of_all(node, schema) is not True
        found.names = dict.fromkeys(schema.get("properties", ()))
        found.needed = dict.fromkeys(schema.get("required", ()))
        for needed in schema.get("dependentRequired", {}).values():
            found.needed |= dict.fromkeys(needed)
        found.patterns = dict.fromkeys(schema.get("patternProperties", ()))
        for key in ("additionalProperties", "unevaluatedProperties"):
            found.is_open |= schema.get(key, False) is not False
        for key in _HERE:
            if key not in schema or key in without:
                continue
            inner = [self._listing(part) for part in self._parts(node, key)]
            if key != "not":
                for one in inner:
                    found.add(one)

    def _parts(self, node: Node, keyword: str) -> list[Node]:
        if keyword == "$ref":
            return [self._document.target(node)]
        if keyword == "dependentSchemas":
            return list(self._document.named(node, keyword).values())
        if keyword in ("allOf", "anyOf", "oneOf"):
            return self._document.children(node, keyword)
        return [self._document.child(node, keyword)]

    # One schema.

    def _part(self, node: Node, outer: _Listing | None = None) -> Any:
        """Return what a schema says itself; with `outer`, each of its branches is whole."""
        if isinstance(node.schema, bool):
            return node.schema
        self._exclusion.step()
        schema = node.schema
        found: Schema = {key: schema[key] for key in _COPIED if key in schema}
        found |= {key: int(schema[key]) for key in _COUNTS if key in schema}
        if "number" in _get_names(schema) and "type" in schema and _BOUNDS.isdisjoint(schema):
            found |= {"minimum": -_MOST, "maximum": _MOST}
        more: list[Any] = []
        for keyword in schema:
            if keyword in ("anyOf", "oneOf"):
                said = self._branches(node, keyword, outer)
            elif (handle := _HANDLERS.get(keyword)) is not None:
                said = handle(self, node, schema)
            else:
                continue
            if said is False:
                return False
            for key, value in {} if said is True else said.items():
                if key == "allOf":
                    more += value
                elif key in found:
                    more.append({key: value})
                else:
                    found[key] = value
        return _all_of([found, *more]) if more else found

    def _child(self, node: Node, keyword: str) -> Any:
        return self._whole(self._document.child(node, keyword))

    def _named(self, node: Node, keyword: str) -> Schema:
        return {name: self._whole(x) for name, x in self._document.named(node, keyword).items()}

    def _branches(self, node: Node, keyword: str, outer: _Listing | None) -> Any:
        nodes = self._document.children(node, keyword)
        if outer is None:
            found = [self._part(one) for one in nodes]
        else:
            found = [self._branch(one, outer) for one in nodes]
        if keyword == "oneOf":
            try:
                found = self._exclusive(node, nodes, found)
            except NoNegationError as error:
                self._leave_out(
                    node,
                    "oneOf",
                    f"has branches that may overlap, and {error} of one cannot be negated; use "
                    "'anyOf', or a 'const' that tells the branches apart",
                )
        return either([one for one in found if one is not False])

    def _branch(self, node: Node, outer: _Listing) -> Any:
        # Alone it may be a reference, which llguidance follows wherever it leads.
        says = outer.lists or outer.excludes or len(outer.needed) > 0
        says |= outer.is_typed and not self._listing(node).is_typed
        return self._whole(node, outer if says else None)

    def _overlaps(self, node: Node) -> list[list[bool]]:
        """Return for each branch of a `oneOf` whether it may share values with each other one."""
        assert isinstance(node.schema, dict)
        beside = {key: value for key, value in node.schema.items() if key != "oneOf"}
        context = Node(node.steps, beside, node.names)
        nodes = self._document.children(node, "oneOf")
        exclusive = self._exclusion.exclusive
        return [
            [one is not two and not exclusive([context, one], [context, two]) for two in nodes]
            for one in nodes
        ]

    def _exclusive(self, node: Node, nodes: list[Node], found: list[Any]) -> list[Any]:
        """Return the branches of a `oneOf`, each without what others of them allow."""
        assert isinstance(node.schema, dict)
        types = get_types(node.schema)
        apart = []
        for one, row in zip(found, self._overlaps(node), strict=True):
            others = [other for other, overlaps in zip(nodes, row, strict=True) if overlaps]
            without_others = [either(self._exclusion.negated(other, types)) for other in others]
            apart.append(_all_of([one, *without_others]))
        return apart

    # Keywords: each returns a schema that applies with the others'.

    def _all(self, node: Node, _schema: Schema) -> Any:
        return _all_of([True, *(self._part(one) for one in self._document.children(node, "allOf"))])

    def _not(self, node: Node, schema: Schema) -> Any:
        try:
            return either(
                self._exclusion.negated(self._document.child(node, "not"), get_types(schema))
            )
        except NoNegationError as error:
            return self._leave_out(
                node, "not", f"of {error} cannot be followed; list the allowed values or types"
            )

    def _if(self, node: Node, schema: Schema) -> Any:
        if "then" not in schema and "else" not in schema:
            return True
        condition = self._document.child(node, "if")
        then, otherwise = (
            self._part(self._document.child(node, key)) if key in schema else True
            for key in ("then", "else")
        )
        try:
            other = either(self._exclusion.negated(condition, get_types(schema)))
        except NoNegationError as error:
            return self._leave_out(node, "if", f"with {error} cannot be followed; use 'anyOf'")
        cases = [_all_of([self._part(condition), then]), _all_of([other, otherwise])]
        return either([one for one in cases if one is not False])

    def _multiple(self, node: Node, schema: Schema) -> Any:
        # llguidance writes no negative multiples.
        if schema.get("maximum", 0) < 0 or schema.get("exclusiveMaximum", 1) <= 0:
            return self._leave_out(node, "multipleOf", "of negative numbers cannot be followed")
        return {"multipleOf": schema["multipleOf"]}

    def _pattern(self, node: Node, schema: Schema) -> Any:
        try:
            return {"pattern": translated(schema["pattern"])}
        except PatternError as error:
            return self._leave_out(node, "pattern", f"cannot be used: {error}")

    def _format(self, _node: Node, schema: Schema) -> Any:
        name = schema["format"]
        if name in FORMAT_PATTERNS:
            return {"pattern": FORMAT_PATTERNS[name]}
        return {"format": name} if name in FORMATS else True

    def _unique(self, node: Node, schema: Schema) -> Any:
        if not schema["uniqueItems"] or schema.get("maxItems", 2) < 2:
            return True
        return self._leave_out(node, "uniqueItems", "cannot be followed; leave it out")

    def _other_items(self, node: Node, schema: Schema) -> Any:
        if schema["unevaluatedItems"] is True or "items" in schema:
            return True
        if _HERE.isdisjoint(schema):
            return {"items": self._child(node, "unevaluatedItems")}
        return self._leave_out(node, "unevaluatedItems", "cannot be followed here; use 'items'")

    def _other_properties(self, node: Node, schema: Schema) -> Any:
        value = schema["unevaluatedProperties"]
        if value is True or "additionalProperties" in schema:
            return True
        if _HERE.isdisjoint(schema):
            return {"additionalProperties": self._child(node, "unevaluatedProperties")}
        listing = self._listing(node)
        if value or listing.has_branches or listing.is_open or "not" in schema:
            return self._leave_out(
                node, "unevaluatedProperties", "cannot be followed here; use 'additionalProperties'"
            )
        return {"allOf": [_exactly(listing)]}

    def _patterns(self, node: Node, _schema: Schema) -> Any:
        made: Schema = {}
        for pattern, found in self._named(node, "patternProperties").items():
            try:
                made[translated(pattern)] = found
            except PatternError as error:
                self._leave_out(node, "patternProperties", f"cannot be used: {error}")
        return {"patternProperties": made}

    def _dependent_names(self, _node: Node, schema: Schema) -> Any:
        rows = schema["dependentRequired"].items()
        needs = {name: {"required": [*dict.fromkeys(needed)]} for name, needed in rows if needed}
        return _all_of([_if_present(schema, name, need) for name, need in needs.items()])

    def _dependent(self, node: Node, schema: Schema) -> Any:
        nodes = self._document.named(node, "dependentSchemas")
        return _all_of([_if_present(schema, name, self._part(x)) for name, x in nodes.items()])

    def _names_of_all(self, node: Node, schema: Schema) -> Any:
        """Follow `propertyNames` by the properties that it leaves."""
        names = self._document.child(node, "propertyNames")
        while isinstance(names.schema, dict) and ASSERTIONS & names.schema.keys() == {"$ref"}:
            # Refuses a circle.
            self._listing(names)
            names = self._document.target(names)
        try:
            allowed, pattern = _name_rule(names.schema)
            if pattern is not None and "patternProperties" in schema:
                raise PatternError("it stands beside 'patternProperties'")
        except PatternError as error:
            return self._leave_out(node, "propertyNames", f"cannot be followed: {error}")
        if allowed is not None:
            listed = {"properties": dict.fromkeys(allowed, True), "additionalProperties": False}
            return {"allOf": [listed]}
        if pattern is None:
            return True
        known = schema.get("properties", ())
        fits = [name for name in known if matches(pattern, name, unclear=False)]
        listed = {"properties": dict.fromkeys(fits, True), "additionalProperties": False}
        return {"allOf": [{**listed, "patternProperties": {pattern: True}}]}

    def _least(self, node: Node, schema: Schema) -> Any:
        least, required, optional = int(schema["minProperties"]), *_names_by_need(schema)
        if least <= len(required):
            return True
        # JSON allows repeated names, so that unlisted properties count as one.
        if least > len(required) + 1 or len(optional) > _MOST_CHOSEN:
            return self._leave_out(node, "minProperties", "is above the number of 'required' + 1")
        if not optional:
            return {"minProperties": least}
        cases: list[Any] = [{"required": [name]} for name in optional]
        if not self._closed and schema.get("additionalProperties") is not False:
            cases.append({"properties": dict.fromkeys(optional, False), "minProperties": least})
        return either(cases)

    def _most(self, node: Node, schema: Schema) -> Any:
        most, required, optional = int(schema["maxProperties"]), *_names_by_need(schema)
        # Whether an object has no other properties than this schema lists.
        if "additionalProperties" in schema:
            is_closed = schema["additionalProperties"] is False
        else:
            is_closed = self._closed and node.steps in self._whole_nodes
            is_closed &= _HERE.isdisjoint(schema)
        is_closed &= "patternProperties" not in schema
        if is_closed and most >= len(required) + len(optional):
            return True
        if not optional:
            return {"maxProperties": most}
        if most < len(required):
            return {"type": ["array", "boolean", "null", "number", "string"]}
        if most == len(required):
            listed = {name: name in required for name in (*required, *optional)}
            return {"allOf": [{"properties": listed, "additionalProperties": False}]}
        return self._leave_out(node, "maxProperties", "cannot be followed with these 'properties'")


_HANDLERS: dict[str, Callable[[_Normaliser, Node, Schema], Any]] = {
    "$ref": lambda self, node, _: self._reference(self._document.target(node), whole=False),
    "allOf": _Normaliser._all,
    "not": _Normaliser._not,
    "if": _Normaliser._if,
    "exclusiveMinimum": lambda _self, _node, schema: above(schema["exclusiveMinimum"]),
    "multipleOf": _Normaliser._multiple,
    "pattern": _Normaliser._pattern,
    "format": _Normaliser._format,
    "items": lambda self, node, _: {"items": self._child(node, "items")},
    "prefixItems": lambda self, node, _: {
        "prefixItems": [*map(self._whole, self._document.children(node, "prefixItems"))]
    },
    "uniqueItems": _Normaliser._unique,
    "contains": lambda self, node, _: self._leave_out(
        node, "contains", "cannot be followed; use 'prefixItems'"
    ),
    "unevaluatedItems": _Normaliser._other_items,
    "unevaluatedProperties": _Normaliser._other_properties,
    "properties": lambda self, node, _: {"properties": self._named(node, "properties")},
    "patternProperties": _Normaliser._patterns,
    "additionalProperties": lambda self, node, _: {
        "additionalProperties": self._child(node, "additionalProperties")
    },
    "required": lambda _self, _node, schema: {"required": [*dict.fromkeys(schema["required"])]},
    "dependentRequired": _Normaliser._dependent_names,
    "dependentSchemas": _Normaliser._dependent,
    "propertyNames": _Normaliser._names_of_all,
    "minProperties": _Normaliser._least,
    "maxProperties": _Normaliser._most,
}


def _if_present(schema: Schema, name: str, needed: Any) -> Any:
    """Return the schema of objects that have no property `name`, or satisfy `needed`."""
    if name in schema.get("required", ()):
        return needed
    return either([one for one in ({"properties": {name: False}}, needed) if one is not False])


def _names_by_need(schema: Schema) -> tuple[list[str], list[str]]:
    """Return the required names of a schema, and the others that it lists and does not forbid."""
    required = dict.fromkeys(schema.get("required", ()))
    listed = schema.get("properties", {}).items()
    return [*required], [name for name, x in listed if name not in required and x is not False]


def _all_of(schemas: Sequence[Any]) -> Any:
    """Return the schema of what satisfies all of some schemas."""
    if False in schemas:
        return False
    found = [one for one in schemas if one is not True and one != {}]
    if len(found) < 2:
        return found[0] if found else True
    return {"allOf": found}


def _get_names(schema: Schema) -> Collection[str]:
    given = schema.get("type", "object")
    return given if isinstance(given, list) else (given,)


def _exactly(listing: _Listing) -> Schema:
    """Return the schema of objects with no other properties than a listing names."""
    patterns = {}
    for pattern in listing.patterns:
        with suppress(PatternError):
            patterns[translated(pattern)] = True
    return {
        "properties": dict.fromkeys(listing.names, True),
        "patternProperties": patterns,
        "additionalProperties": False,
    }


def _name_rule(schema: Any) -> tuple[list[str] | None, str | None]:
    """Return the only names that a schema of names allows, or their pattern.

    Raises `PatternError` if it has neither.
    """
    if isinstance(schema, bool) or "string" not in get_types(schema):
        return (None if schema is True else []), None
    said = (ASSERTIONS & schema.keys()) - {"type", "$ref"}
    if "format" in said and schema["format"] not in FORMATS:
        said -= {"format"}
    if said in ({"enum"}, {"const"}):
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return list(dict.fromkeys(value for value in values if isinstance(value, str))), None
    if said == {"pattern"}:
        return None, translated(schema["pattern"])
    if said and said <= {"minLength", "maxLength"}:
        most = int(schema["maxLength"]) if "maxLength" in schema else ""
        return None, f"^(?s:.){{{int(schema.get('minLength', 0))},{most}}}$"
    if said or "$ref" in schema:
        raise PatternError("only 'enum', 'const', 'pattern' or lengths can be followed")
    return None, None


def _check_finite(root: Any, definitions: Schema) -> None:
    """Refuse a schema that only infinite values satisfy, such as one that requires itself."""
    finite: set[str] = set()
    grows = True
    while grows:
        grows = False
        for name in reversed([name for name in definitions if name not in finite]):
            if _is_finite(definitions[name], finite):
                finite.add(name)
                grows = True
    if not _is_finite(root, finite):
        raise UnusableError("#: no finite value satisfies it")


def _is_finite(schema: Any, finite: set[str]) -> bool:
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in finite:
        return False
    if not all(_is_finite(part, finite) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_is_finite(part, finite) for part in schema["anyOf"]):
        return False
    types = set(_get_names(schema)) if "type" in schema else {"string"}
    if types - {"object", "array"} or not {"enum", "const"}.isdisjoint(schema):
        return True
    properties = schema.get("properties", {})
    needed = [properties.get(name, True) for name in schema.get("required", ())]
    if "object" in types and all(_is_finite(part, finite) for part in needed):
        return True
    first, count = schema.get("prefixItems", []), schema.get("minItems", 0)
    needed = [*first[:count], *([schema.get("items", True)] if count > len(first) else [])]
    return "array" in types and all(_is_finite(part, finite) for part in needed)
