"""Schema resources: `$id`, anchors and dynamic references become references into the root.

JSON Schema 2020-12 Core, 8.2 and 9.2: `$id` gives a subschema a base URI of its own, to which
references in it are relative. Nothing is retrieved; the meta-schemas of the drafts are known.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.rewriting.drafts import REFERENCE_ALONE, draft_of
from server.structured_outputs.schema_walk import Schema, Steps, children, followed, names_within
from server.structured_outputs.standard_documents import standard_document

_NAMES = ("$id", "id", "$anchor", "$dynamicAnchor")
_REFERENCES = ("$ref", "$dynamicRef")
_ASIDE = ("$defs", "definitions")
_CHANGED = frozenset((*_NAMES, *_REFERENCES))

_Scope = tuple[tuple[str, Steps], ...]
"""Dynamic anchors of the resources entered so far, each with the outermost place of its name."""

MAX_SCOPED = 1000
"""Most copies of subschemas for dynamic references that lead to several places."""


def localized(root: Any) -> Any:
    """Return the schema with its references as JSON pointers from the root.

    The schema itself is returned if that changes nothing. Raises `UnusableError` for a reference
    to another document, or to a resource or anchor that the schema does not have.
    """
    if not isinstance(root, dict) or _CHANGED.isdisjoint(names_within(root)):
        return root
    found = _Resources.of(root)
    if not found.has_names and all(map(_is_local, found.references)):
        return root
    found = found.completed()
    targets = [found.target(*reference) for reference in found.references]
    if None in targets:
        return _ScopedCopies(found).schema()
    changed = copy.deepcopy(found.root)
    for (pointer, keyword, _), target in zip(found.references, targets, strict=True):
        assert target is not None
        _refer_to(_at(changed, pointer), keyword, _fragment(target))
    for pointer in found.named:
        _drop_names(_at(changed, pointer))
    return changed


def _refer_to(schema: Schema, keyword: str, fragment: str) -> None:
    """Replace a reference by `$ref`; a second one of the same schema goes to `allOf`."""
    other = "$dynamicRef" if keyword == "$ref" else "$ref"
    del schema[keyword]
    if keyword == "$dynamicRef" and other in schema:
        schema["allOf"] = [*schema.get("allOf", ()), {"$ref": fragment}]
    else:
        schema["$ref"] = fragment


def _drop_names(schema: Schema) -> None:
    for name in _NAMES:
        if isinstance(schema.get(name), str):
            del schema[name]


@dataclass(slots=True)
class _Resources:
    """Places of a schema's resources, anchors and references."""

    root: Schema
    places: dict[str, Steps] = field(default_factory=dict)
    anchors: dict[tuple[str, str], Steps] = field(default_factory=dict)
    dynamic: dict[str, list[tuple[str, Steps]]] = field(default_factory=dict)
    bases: dict[Steps, str] = field(default_factory=dict)
    references: list[tuple[Steps, str, str]] = field(default_factory=list)
    named: list[Steps] = field(default_factory=list)

    @classmethod
    def of(cls, root: Schema) -> _Resources:
        """Find the resources of a schema."""
        draft = draft_of(root)
        found = cls(root)
        found.places[""] = ()
        stack: list[tuple[Steps, Schema, str]] = [((), root, "")]
        while stack:
            pointer, schema, base = stack.pop()
            base = found._note(pointer, schema, base, draft)
            stack += [((*pointer, *steps), inner, base) for steps, inner in children(schema)]
        return found

    def completed(self) -> _Resources:
        """Return the resources with those of the meta-schemas to which references lead."""
        draft, known = draft_of(self.root), dict[str, Schema]()
        found, grown = self, True
        while grown:
            grown = False
            for pointer, _, ref in found.references:
                uri = urldefrag(_joined(found.bases[pointer], ref)).url
                if uri in found.places or uri in known:
                    continue
                if (document := standard_document(uri, draft)) is not None:
                    known[uri], grown = document, True
            if grown:
                found = _Resources.of(
                    {**self.root, "$defs": {**self.root.get("$defs", {}), **known}}
                )
        return found

    @property
    def has_names(self) -> bool:
        """True if a part of the schema has a name to which references may lead."""
        return any(self.named) or len(self.anchors) > 0

    def _note(self, pointer: Steps, schema: Schema, base: str, draft: int) -> str:
        """Note the names and references of a schema; return the base URI of its parts."""
        if "$ref" in schema and draft in REFERENCE_ALONE:
            self.bases[pointer] = base
            self._refer(pointer, schema)
            return base
        name = schema.get("id" if draft == 4 else "$id")
        if isinstance(name, str):
            self.named.append(pointer)
            if name.startswith("#"):
                self.anchors[base, name[1:]] = pointer
            else:
                base = urldefrag(_joined(base, name)).url
                self.places[base] = pointer
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                self.named.append(pointer)
                self.anchors[base, anchor] = pointer
                if keyword == "$dynamicAnchor":
                    self.dynamic.setdefault(anchor, []).append((base, pointer))
        self.bases[pointer] = base
        self._refer(pointer, schema)
        return base

    def _refer(self, pointer: Steps, schema: Schema) -> None:
        self.references += [
            (pointer, keyword, schema[keyword])
            for keyword in _REFERENCES
            if isinstance(schema.get(keyword), str)
        ]

    def target(self, pointer: Steps, keyword: str, ref: str) -> Steps | None:
        """Return the place to which a reference leads; None for a dynamic one that may differ."""
        found, name = self.first_target(pointer, keyword, ref)
        if name is None:
            return found
        places = self.dynamic[name]
        # The root's resource is the outermost one, wherever the reference is reached from.
        root_base = self.bases[()]
        outer = [place for base, place in places if base == root_base]
        if len(places) > 1 and not outer:
            return None
        return outer[0] if outer else found

    def first_target(self, pointer: Steps, keyword: str, ref: str) -> tuple[Steps, str | None]:
        """Return the place to which a reference leads without a dynamic scope.

        With the name of the dynamic anchor there, if the scope may change that place.
        """
        uri, fragment = urldefrag(_joined(self.bases[pointer], ref))
        if uri not in self.places:
            raise UnusableError(
                f"{_path(pointer)}: $ref {ref!r} leads to another document, because only "
                "references into the schema itself are followed; put its target into '$defs'"
            )
        found = self._within(uri, unquote(fragment), ref, pointer)
        is_dynamic = keyword == "$dynamicRef" and (uri, found) in self.dynamic.get(fragment, ())
        return found, fragment if is_dynamic else None

    def _within(self, uri: str, fragment: str, ref: str, pointer: Steps) -> Steps:
        if (uri, fragment) in self.anchors:
            return self.anchors[uri, fragment]
        if fragment and not fragment.startswith("/"):
            raise UnusableError(f"{_path(pointer)}: $ref {ref!r} leads nowhere")
        place = self.places[uri]
        found = followed(_at(self.root, place), fragment.split("/")[1:])
        if found is None:
            raise UnusableError(f"{_path(pointer)}: $ref {ref!r} leads nowhere")
        return (*place, *found[0])


class _ScopedCopies:
    """Copies of subschemas, one for each dynamic scope in which a reference leads to them.

    JSON Schema 2020-12 Core, 8.2.3.2: a dynamic reference leads to the anchor of its name in the
    outermost resource of those entered so far.
    """

    def __init__(self, resources: _Resources) -> None:
        self._resources = resources
        self._anchors: dict[str, list[tuple[str, Steps]]] = {}
        for name, places in resources.dynamic.items():
            for base, place in places:
                self._anchors.setdefault(base, []).append((name, place))
        self._names: dict[tuple[Steps, _Scope], str] = {}
        self._waiting: list[tuple[str, Steps, _Scope]] = []

    def schema(self) -> Schema:
        """Return the root with the copies in its `$defs`."""
        scope = self._entered((), ())
        self._names[(), scope] = "#"
        root = self._copy((), self._resources.root, scope)
        made: Schema = {}
        while self._waiting:
            name, pointer, scope = self._waiting.pop()
            made[name] = self._copy(pointer, _at(self._resources.root, pointer), scope)
        return {**root, "$defs": made}

    def _entered(self, scope: _Scope, pointer: Steps) -> _Scope:
        """Return the scope after the resource of a place is entered."""
        base = next(
            self._resources.bases[pointer[:end]]
            for end in range(len(pointer), -1, -1)
            if pointer[:end] in self._resources.bases
        )
        new = self._anchors.get(base, ())
        return tuple(sorted({**dict(new), **dict(scope)}.items())) if new else scope

    def _copy(self, pointer: Steps, schema: Any, scope: _Scope) -> Any:
        """Return a subschema with its references as they lead in a scope."""
        if not isinstance(schema, dict):
            return schema
        scope = self._entered(scope, pointer)
        changed = {key: value for key, value in schema.items() if key not in _ASIDE}
        for steps, inner in children(schema):
            if steps[0] in _ASIDE:
                continue
            here = self._copy((*pointer, *steps), inner, scope)
            if len(steps) == 1:
                changed[str(steps[0])] = here
            else:
                key, place = str(steps[0]), steps[1]
                if changed[key] is schema[key]:
                    changed[key] = copy.copy(schema[key])
                changed[key][place] = here
        for keyword in _REFERENCES:
            if isinstance(ref := schema.get(keyword), str):
                target, name = self._resources.first_target(pointer, keyword, ref)
                if name is not None:
                    target = dict(scope).get(name, target)
                _refer_to(changed, keyword, self._reference(target, scope))
        _drop_names(changed)
        return changed

    def _reference(self, target: Steps, scope: _Scope) -> str:
        """Return the reference to the copy of a place in a scope."""
        key = target, self._entered(scope, target)
        if key not in self._names:
            if len(self._names) > MAX_SCOPED:
                raise UnusableError(
                    f"its dynamic references lead to more than {MAX_SCOPED} places, the limit of "
                    "this server"
                )
            name = f"{target[-1] if target else 'root'}_{len(self._names)}"
            self._names[key] = _fragment(("$defs", name))
            self._waiting.append((name, *key))
        return self._names[key]


def _is_local(reference: tuple[Steps, str, str]) -> bool:
    _, keyword, ref = reference
    return keyword == "$ref" and (ref == "#" or ref.startswith("#/"))


def _joined(base: str, ref: str) -> str:
    """Return the URI of a reference; Python's `urljoin` keeps no base of the scheme `urn`."""
    if not ref:
        return base
    if ref.startswith("#"):
        return urldefrag(base).url + ref
    return ref if urlsplit(ref).scheme else urljoin(base, ref)


def _at(root: Any, pointer: Steps) -> Any:
    for step in pointer:
        root = root[step]
    return root


def _fragment(pointer: Steps) -> str:
    """Return the JSON pointer (RFC 6901) as the fragment of a URI."""
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in pointer)
    return "#" + "".join(f"/{quote(step, safe='~!$&()*+,;=:@')}" for step in steps)


def _path(pointer: Steps) -> str:
    parts: Iterator[str] = (f"[{s}]" if isinstance(s, int) else f".{s}" for s in pointer)
    return "$" + "".join(parts)
