"""Finds the model that owns a stored object: reads each model's database, loaded or not."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from server.host.tasks import in_thread
from server.model_pool.pooled_model import PooledModel

_DATABASE = "store.sqlite"
_TABLES = ("files", "batches", "responses")
_PENDING = (
    "SELECT (SELECT count(*) FROM batches WHERE status IN "
    "('validating', 'in_progress', 'finalizing', 'cancelling')) + "
    "(SELECT count(*) FROM responses WHERE background AND status IN ('queued', 'in_progress'))"
)
_TIMEOUT_S = 5.0


class StoredObjects:
    """The databases of all models below --data-dir; without one there are none."""

    def __init__(self, data_dir: Path | None, models: Iterable[PooledModel]) -> None:
        self._databases = {
            model: data_dir / model.entry.folder / _DATABASE
            for model in models
            if data_dir is not None
        }

    async def owner_of(self, object_id: str) -> PooledModel | None:
        """Return the model that has stored a file, batch or response of this id."""
        return await in_thread(lambda: self._owner_of(object_id))

    async def with_pending_work(self) -> list[PooledModel]:
        """Return the models whose batches or background responses have not ended."""
        return await in_thread(
            lambda: [m for m, path in self._databases.items() if _ask(path, _PENDING, ())]
        )

    def _owner_of(self, object_id: str) -> PooledModel | None:
        each = " UNION ALL ".join(f"SELECT 1 FROM {table} WHERE id = ?" for table in _TABLES)
        ids = (object_id,) * len(_TABLES)
        return next((m for m, path in self._databases.items() if _ask(path, each, ids)), None)


def _ask(path: Path, query: str, values: tuple[str, ...]) -> int:
    """Return the number in the first row, 0 without a row or a database."""
    if not path.exists():
        return 0
    try:
        with closing(sqlite3.connect(path, timeout=_TIMEOUT_S)) as connection:
            connection.execute("PRAGMA query_only = ON")
            row = connection.execute(query, values).fetchone()
    except sqlite3.Error:
        # Its model creates or migrates it just now, or reports the damage when it is loaded.
        return 0
    return 0 if row is None else int(row[0])
