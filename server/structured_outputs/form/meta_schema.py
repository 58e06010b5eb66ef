"""Check of a schema against the meta-schema of its draft."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.form.well_formed import is_well_formed

if TYPE_CHECKING:
    from jsonschema.protocols import Validator


def check_form(schema: Any) -> None:
    """Raise `UnusableError` for a schema of draft 3, or one that its meta-schema refuses."""
    # See `trial_process` for when jsonschema is imported.
    from jsonschema.validators import Draft202012Validator, validator_for

    named = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(named, str) and "draft-03" in named:
        raise UnusableError(
            "$.$schema: draft 3 is not supported; name draft-04, draft-06, draft-07, 2019-09 or "
            "2020-12"
        )
    # It takes no other types of `$schema`.
    known = schema if isinstance(named, str) else True
    kind = validator_for(known, Draft202012Validator)
    if (draft := _drafts().get(kind)) is not None and is_well_formed(schema, draft):
        return
    if kind is Draft202012Validator:
        judge = _latest()
    else:
        judge = kind(kind.META_SCHEMA, format_checker=kind.FORMAT_CHECKER)
    for error in judge.iter_errors(schema):
        raise UnusableError(f"{error.json_path}: {error.message}")


@functools.cache
def _drafts() -> dict[type[Validator], int]:
    """Return the years or numbers of the drafts by their validators."""
    from jsonschema import validators

    return {
        validators.Draft4Validator: 4,
        validators.Draft6Validator: 6,
        validators.Draft7Validator: 7,
        validators.Draft201909Validator: 2019,
        validators.Draft202012Validator: 2020,
    }


@functools.cache
def _latest() -> Validator:
    """Return the validator of 2020-12's meta-schema, with its vocabularies in one schema.

    Seven vocabularies, each with a dynamic reference to all of them, take three times as long.
    """
    from jsonschema.validators import Draft202012Validator
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

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
