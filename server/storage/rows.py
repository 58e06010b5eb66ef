"""Rows of owners: look-up by id, and pages in the order of creation."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.errors import NotFoundError, describe

Conditions = Sequence[tuple[str, Any]]
"""Columns or SQL expressions with the values that they must have."""
_NOUNS = {"files": "file", "batches": "batch", "responses": "response"}


@dataclass(frozen=True, slots=True)
class Page:
    """Limit, start and order of a page of a list."""

    limit: int
    after: str | None = None
    newest_first: bool = True


def new_id(prefix: str) -> str:
    """Return a random id of 128 bits."""
    return prefix + secrets.token_hex(16)


def find_row(
    db: sqlite3.Connection,
    table: str,
    owner: str,
    row_id: str,
    param: str,
    *,
    columns: str = "*",
) -> sqlite3.Row:
    """Return columns of an owner's row. Raises `NotFoundError` for the parameter `param`."""
    row: sqlite3.Row | None = db.execute(
        f"SELECT {columns} FROM {table} WHERE owner = ? AND id = ?", (owner, row_id)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"There is no {_NOUNS[table]} {describe(row_id)}.", param=param)
    return row


def page_of_rows(
    db: sqlite3.Connection, table: str, owner: str, page: Page, conditions: Conditions = ()
) -> tuple[list[sqlite3.Row], bool]:
    """Return a page of an owner's rows, and whether more follow. Raises `NotFoundError`."""
    order, sign = ("DESC", "<") if page.newest_first else ("ASC", ">")
    where, values = _where(owner, conditions)
    if page.after is not None:
        at = db.execute(
            f"SELECT created_at FROM {table} WHERE id = ? AND owner = ?", (page.after, owner)
        ).fetchone()
        if at is None:
            raise NotFoundError(
                f"'after' is {describe(page.after)}, which is not there.", param="after"
            )
        where += f" AND (created_at, id) {sign} (?, ?)"
        values += [at[0], page.after]
    rows = db.execute(
        f"SELECT * FROM {table} WHERE {where} ORDER BY created_at {order}, id {order} LIMIT ?",
        (*values, page.limit + 1),
    ).fetchall()
    return rows[: page.limit], len(rows) > page.limit


def _where(owner: str, conditions: Conditions) -> tuple[str, list[Any]]:
    """Return an SQL condition and its values."""
    every = [("owner", owner), *conditions]
    return " AND ".join(f"{column} = ?" for column, _ in every), [value for _, value in every]
