"""Rows of the tables of fields, made from the shared row of the same path. Pure functions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from server.request.fields.field import Field, FieldAction
from server.request.fields.shared import SHARED

_SHARED = {row.path: row for row in SHARED}


def row(path: str, action: FieldAction, why: str = "", **columns: Any) -> Field:
    """Return the row of a path; `columns` are fields of `Field`."""
    return replace(_SHARED.get(path, Field(path)), action=action, why=why, **columns)


def _rows(action: FieldAction, *paths: str, why: str = "", **columns: Any) -> tuple[Field, ...]:
    return tuple(row(path, action, why, **columns) for path in paths)


obeyed = partial(_rows, FieldAction.OBEYED)
granted = partial(_rows, FieldAction.GRANTED)
ignored = partial(_rows, FieldAction.IGNORED)
refused = partial(_rows, FieldAction.REFUSED)
