"""Abbreviations for JSON schemas."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

FLAG: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string"}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
# Checked by Kubernetes' own schema.
FREE: Schema = {"type": "object"}
FREE_LIST: Schema = {"type": "array", "items": FREE}
ABSOLUTE: Schema = {"type": "string", "pattern": "^/"}
DIGEST: Schema = {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}
QUANTITY: Schema = {
    "type": "string",
    "pattern": "^[0-9]+(\\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$",
}
# "" for unset; else a DNS label or subdomain.
NAME: Schema = {
    "type": "string",
    "maxLength": 253,
    "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$",
}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}


def closed(**properties: Schema) -> Schema:
    """Return the schema of an object with only these members, none of them required."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


def whole(minimum: int = 0) -> Schema:
    """Return the schema of an integer of at least `minimum`."""
    return {"type": "integer", "minimum": minimum}


def one_of(*values: str) -> Schema:
    """Return the schema of one of these texts."""
    return {"enum": list(values)}


def many(item: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": item}


def required(schema: Schema, *names: str) -> Schema:
    """Return the object's schema with these members required."""
    return {**schema, "required": list(names)}


def read_only_volume(*kinds: str) -> Schema:
    """Return the schema of no volume, or one kind of volume with existing files."""
    sources = {
        "persistentVolumeClaim": required(closed(claimName=NAME, readOnly=FLAG), "claimName"),
        "image": required(
            closed(reference=TEXT, pullPolicy=one_of("Always", "IfNotPresent", "Never")),
            "reference",
        ),
        "nfs": required(closed(server=TEXT, path=ABSOLUTE, readOnly=FLAG), "server", "path"),
        "hostPath": required(closed(path=ABSOLUTE, type=TEXT), "path"),
    }
    return {**closed(**{kind: sources[kind] for kind in kinds or sources}), "maxProperties": 1}
