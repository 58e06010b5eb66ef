"""Check of a schema against the meta-schema of its draft."""

from __future__ import annotations

import functools
import json
from typing import Any

from jsonschema.protocols import Validator
from jsonschema.validators import (
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
    validator_for,
)
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.form.well_formed import is_well_formed

_DRAFTS = {
    Draft4Validator: 4,
    Draft6Validator: 6,
    Draft7Validator: 7,
    Draft201909Validator: 2019,
    Draft202012Validator: 2020,
}


def check_form(schema: Any) -> None:
    """Raise `UnusableError` for a schema of draft 3, or one that its meta-schema refuses."""
    named = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(named, str) and "draft-03" in named:
        raise UnusableError(
            "$.$schema: draft 3 is not supported; name draft-04, draft-06, draft-07, 2019-09 or "
            "2020-12"
        )
    # It takes no other types of `$schema`.
    known = schema if isinstance(named, str) else True
    kind = validator_for(known, Draft202012Validator)
    if kind in _DRAFTS and is_well_formed(schema, _DRAFTS[kind]):
        return
    if kind is Draft202012Validator:
        judge = _latest()
    else:
        judge = kind(kind.META_SCHEMA, format_checker=kind.FORMAT_CHECKER)
    for error in judge.iter_errors(schema):
        raise UnusableError(f"{error.json_path}: {error.message}")


@functools.cache
def _latest() -> Validator:
    """Return the validator of 2020-12's meta-schema, with its vocabularies in one schema.

    Seven vocabularies, each with a dynamic reference to all of them, take three times as long.
    """
    outer = Draft202012Validator.META_SCHEMA
    base = "https://json-schema.org/draft/2020-12/"
    parts = [outer, *(REGISTRY.contents(base + part["$ref"]) for part in outer["allOf"])]
    whole: dict[str, Any] = {"type": ["object", "boolean"], "properties": {}, "$defs": {}}
    for part in parts:
        text = json.dumps(part).replace('"$dynamicRef": "#meta"', '"$ref": "#"')
        inner = json.loads(text.replace('"meta/validation#/', '"#/'))
        whole["properties"] |= inner["properties"]
        whole["$defs"] |= inner.get("$defs", {})
    return Draft202012Validator(whole, format_checker=Draft202012Validator.FORMAT_CHECKER)
