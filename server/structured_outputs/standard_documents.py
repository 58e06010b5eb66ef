"""Meta-schemas of the drafts, to which a schema may refer without containing them."""

from __future__ import annotations

import functools

from server.structured_outputs.rewriting.drafts import draft_of, modern
from server.structured_outputs.schema_walk import Schema

_LATEST = 2020
_WITHOUT_SCOPES = (4, 6, 7)
"""Drafts of which a meta-schema has no dynamic references."""


@functools.cache
def standard_document(uri: str, draft: int) -> Schema | None:
    """Return the meta-schema at a URI without fragment, for a schema of a draft; None if unknown.

    A schema of 2020-12 may refer to the older ones, which are translated; others to their own.
    """
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
    from referencing.exceptions import NoSuchResource

    try:
        document: Schema = REGISTRY.contents(uri)
    except NoSuchResource:
        return None
    own = draft_of(document)
    if own == draft and own in (*_WITHOUT_SCOPES, _LATEST):
        return document
    if draft == _LATEST and own in _WITHOUT_SCOPES:
        return {**modern(document), "$id": uri}
    return None
