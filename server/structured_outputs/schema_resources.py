"""Schema resources: `$id`, anchors and dynamic references become references into the root.

JSON Schema 2020-12 Core, 8.2 and 9.2: `$id` gives a subschema a base URI of its own, to which
references in it are relative. Nothing is retrieved.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.rewriting.drafts import REFERENCE_ALONE, draft_of
from server.structured_outputs.schema_walk import Schema, children, followed

_NAMES = ("$id", "id", "$anchor", "$dynamicAnchor")
_REFERENCES = ("$ref", "$dynamicRef")

Pointer = tuple[str | int, ...]
"""Keys and indices from the root to a part of a schema."""


def localized(root: Any) -> Any:
    """Return the schema with its references as JSON pointers from the root.

    The schema itself is returned if that changes nothing. Raises `UnusableError` for a reference
    to another document, or to a resource or anchor that the schema does not have.
    """
    if not isinstance(root, dict):
        return root
    found = _Resources.of(root)
    if not found.has_names and all(map(_is_local, found.references)):
        return root
    changed = copy.deepcopy(root)
    for pointer, keyword, ref in found.references:
        schema = _at(changed, pointer)
        target = found.target(pointer, keyword, ref)
        if target is not None:
            schema.pop(keyword)
            schema["$ref"] = _fragment(target)
    for pointer in found.named:
        for name in _NAMES:
            if isinstance(_at(changed, pointer).get(name), str):
                del _at(changed, pointer)[name]
    return changed


@dataclass(slots=True)
class _Resources:
    """Places of a schema's resources, anchors and references."""

    root: Schema
    places: dict[str, Pointer] = field(default_factory=dict)
    anchors: dict[tuple[str, str], Pointer] = field(default_factory=dict)
    dynamic: dict[str, list[tuple[str, Pointer]]] = field(default_factory=dict)
    bases: dict[Pointer, str] = field(default_factory=dict)
    references: list[tuple[Pointer, str, str]] = field(default_factory=list)
    named: list[Pointer] = field(default_factory=list)

    @classmethod
    def of(cls, root: Schema) -> _Resources:
        """Find the resources of a schema."""
        draft = draft_of(root)
        found = cls(root)
        found.places[""] = ()
        stack: list[tuple[Pointer, Schema, str]] = [((), root, "")]
        while stack:
            pointer, schema, base = stack.pop()
            base = found._note(pointer, schema, base, draft)
            stack += [((*pointer, *steps), inner, base) for steps, inner in children(schema)]
        return found

    @property
    def has_names(self) -> bool:
        """True if a part of the schema has a name to which references may lead."""
        return any(self.named) or len(self.anchors) > 0

    def _note(self, pointer: Pointer, schema: Schema, base: str, draft: int) -> str:
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

    def _refer(self, pointer: Pointer, schema: Schema) -> None:
        self.references += [
            (pointer, keyword, schema[keyword])
            for keyword in _REFERENCES
            if isinstance(schema.get(keyword), str)
        ]

    def target(self, pointer: Pointer, keyword: str, ref: str) -> Pointer | None:
        """Return the place to which a reference leads; None for a dynamic one that may differ."""
        uri, fragment = urldefrag(_joined(self.bases[pointer], ref))
        if uri not in self.places:
            where = _path(pointer)
            raise UnusableError(
                f"{where}: $ref {ref!r} leads to another document, because only references into "
                "the schema itself are followed; put its target into '$defs'"
            )
        found = self._within(uri, unquote(fragment), ref, pointer)
        if keyword == "$dynamicRef" and fragment in self.dynamic:
            places = self.dynamic[fragment]
            if (uri, found) not in places:
                return found
            # The root's resource is the outermost one, wherever the reference is reached from.
            root_base = self.bases[()]
            outer = [place for base, place in places if base == root_base]
            if len(places) > 1 and not outer:
                return None
            return outer[0] if outer else found
        return found

    def _within(self, uri: str, fragment: str, ref: str, pointer: Pointer) -> Pointer:
        if (uri, fragment) in self.anchors:
            return self.anchors[uri, fragment]
        if fragment and not fragment.startswith("/"):
            raise UnusableError(f"{_path(pointer)}: $ref {ref!r} leads nowhere")
        place = self.places[uri]
        found = followed(_at(self.root, place), fragment.split("/")[1:])
        if found is None:
            raise UnusableError(f"{_path(pointer)}: $ref {ref!r} leads nowhere")
        return (*place, *found[0])


def _is_local(reference: tuple[Pointer, str, str]) -> bool:
    _, keyword, ref = reference
    return keyword == "$ref" and (ref == "#" or ref.startswith("#/"))


def _joined(base: str, ref: str) -> str:
    """Return the URI of a reference; Python's `urljoin` keeps no base of the scheme `urn`."""
    if not ref:
        return base
    if ref.startswith("#"):
        return urldefrag(base).url + ref
    return ref if urlsplit(ref).scheme else urljoin(base, ref)


def _at(root: Any, pointer: Pointer) -> Any:
    for step in pointer:
        root = root[step]
    return root


def _fragment(pointer: Pointer) -> str:
    """Return the JSON pointer (RFC 6901) as the fragment of a URI."""
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in pointer)
    return "#" + "".join(f"/{quote(step, safe='~!$&()*+,;=:@')}" for step in steps)


def _path(pointer: Pointer) -> str:
    parts: Iterator[str] = (f"[{s}]" if isinstance(s, int) else f".{s}" for s in pointer)
    return "$" + "".join(parts)
