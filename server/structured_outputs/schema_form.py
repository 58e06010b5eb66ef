"""Check of a schema against the meta-schema of its draft."""

from __future__ import annotations

from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for

from server.structured_outputs.constraint import UnusableError


def check_form(schema: Any) -> None:
    """Raise `UnusableError` for a schema of draft 3, or one that its meta-schema refuses."""
    named = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(named, str) and "draft-03" in named:
        raise UnusableError(
            "$.$schema: draft 3 is not supported; name draft-04, draft-06, draft-07, 2019-09 or "
            "2020-12"
        )
    try:
        validator_for(schema, Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        raise UnusableError(f"{error.json_path}: {error.message}") from None
