"""Schemas of the JSON-Schema-Test-Suite as cases, with the documents to which they refer.

The suite offers those documents under `http://localhost:1234/`. A server that retrieves nothing
gets them in the schema's `$defs` (JSON Schema 2020-12 Core, 9.3: bundling).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin

HOST = "http://localhost:1234/"
_MANY = 64
"""Most documents of one schema."""


def suite_cases(folder: Path) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Yield the name, schema and tests of each case in a folder such as `tests/draft2020-12`.

    Without its folder `optional`. The documents are those of `remotes`, two folders up.
    """
    documents = _documents(folder.parent.parent / "remotes", folder.name)
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            schema = bundled(group["schema"], documents)
            yield f"{path.stem}: {group['description']}", schema, group["tests"]


def bundled(schema: Any, documents: Mapping[str, Any]) -> Any:
    """Return the schema with the documents to which it leads, by their addresses, in `$defs`."""
    needed: dict[str, Any] = {}
    waiting = [("", schema)]
    while waiting and len(needed) < _MANY:
        base, part = waiting.pop()
        for uri in _addresses(part, base):
            if uri in documents and uri not in needed:
                needed[uri] = _named(documents[uri], uri)
                waiting.append((uri, documents[uri]))
    if not needed:
        return schema
    extra = {f"document {index}": document for index, document in enumerate(needed.values())}
    return {**schema, "$defs": {**schema.get("$defs", {}), **extra}}


def _documents(folder: Path, draft: str) -> dict[str, Any]:
    """Return the documents without a draft and those of one, by their addresses."""
    found = {}
    for path in sorted(folder.rglob("*.json")):
        parts = path.relative_to(folder).parts
        if parts[0] == draft or not parts[0].startswith("draft"):
            document = json.loads(path.read_text(encoding="utf-8"))
            found[HOST + "/".join(parts)] = document
    return found


def _named(document: Any, uri: str) -> Any:
    """Return a document that has its address as its `$id`, in a schema around it if it has one."""
    if not isinstance(document, dict):
        return {"$id": uri, "allOf": [document]}
    own = document.get("$id")
    if own is None or urljoin(uri, own) == uri:
        return {**document, "$id": uri}
    # References to the address lead to the document, which has another name.
    return {"$id": uri, "$ref": urljoin(uri, own), "$defs": {"document": document}}


def _addresses(part: Any, base: str) -> Iterator[str]:
    """Yield the addresses of all references in a schema, as its `$id`s resolve them."""
    if isinstance(part, list):
        for item in part:
            yield from _addresses(item, base)
    elif isinstance(part, dict):
        if isinstance(name := part.get("$id"), str):
            base = urljoin(base, name)
        for keyword in ("$ref", "$dynamicRef"):
            if isinstance(ref := part.get(keyword), str):
                yield urldefrag(urljoin(base, ref)).url
        for item in part.values():
            yield from _addresses(item, base)
