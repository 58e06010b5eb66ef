"""Files and batches of one server: what the routes ask, and what works on it meanwhile."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from starlette.types import ASGIApp

from server.admission import Admission
from server.batches import table
from server.batches.batch import Batch, Wish
from server.batches.feeder import Feeder, Tally
from server.batches.input_lines import LineRules
from server.batches.results import ResultFiles
from server.batches.room import SpareRows
from server.errors import StorageFullError
from server.host.tasks import while_running
from server.lifecycle import Lifecycle
from server.settings import ServerSettings
from server.storage.files import FileStore, Page, Quotas
from server.storage.store import Store

logger = logging.getLogger(__name__)

_LOOK_S = 5.0
_TIDY_EVERY = 12


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is, a few seconds ago."""

    batches: dict[str, int] = field(default_factory=dict)
    lines_to_do: int = 0
    files: int = 0
    stored_bytes: int = 0
    free_bytes: int = 0


class BatchService:
    """Everything behind /v1/files and /v1/batches."""

    def __init__(
        self, store: Store, settings: ServerSettings, lifecycle: Lifecycle, admission: Admission
    ) -> None:
        self._folder, self._database = store.folder, store.database
        self._keep_s = settings.file_retention_s
        self._max_open = settings.max_batches_per_key
        quotas = Quotas(
            settings.max_file_bytes,
            store.max_bytes,
            settings.max_files_per_key,
            settings.file_retention_s,
        )
        self.files = FileStore(self._database, self._folder, quotas)
        self._results = ResultFiles(self._database, self._folder, settings.file_retention_s)
        rules = LineRules("", settings.max_batch_lines, settings.max_body_bytes)
        spare = SpareRows(lifecycle, admission)
        self._feeder = Feeder(self._database, self.files, self._results, rules, spare)
        self._seen = Seen()

    @property
    def statuses(self) -> Mapping[str, int]:
        """How many batches there are by status, a few seconds ago."""
        return self._seen.batches

    def gauges(self) -> dict[str, float]:
        """Return what there is, by the names of metrics."""
        seen = self._seen
        return {
            "rbln_batch_lines_to_do": seen.lines_to_do,
            "rbln_batch_lines_running": self._feeder.running,
            "rbln_stored_files": seen.files,
            "rbln_stored_bytes": seen.stored_bytes,
            "rbln_storage_free_bytes": seen.free_bytes,
            "rbln_storage_full": self._results.full,
        }

    def take_tally(self) -> Tally:
        """Return what was done since the last call."""
        return self._feeder.take_tally()

    @asynccontextmanager
    async def working(self, app: ASGIApp) -> AsyncIterator[None]:
        """Answer lines through `app` for the length of the block."""
        await self.files.remove_unknown()
        async with while_running(self._feeder.run(app)), while_running(self._look_around()):
            yield

    async def create(self, wish: Wish) -> Batch:
        """Begin a batch. Raises `NotFoundError`, `InvalidValueError`, `StorageFullError`."""
        batch = await self._database.run(partial(self._create, wish=wish))
        self._feeder.nudge()
        return batch

    async def get(self, owner: str, batch_id: str) -> Batch:
        """Return a batch. Raises `NotFoundError`."""
        return await self._database.run(partial(table.get, owner=owner, batch_id=batch_id))

    async def every(self, owner: str, page: Page) -> tuple[list[Batch], bool]:
        """Return a page of the owner's batches, and whether there are more."""
        return await self._database.run(partial(table.every, owner=owner, page=page))

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Ask for a batch's end. Raises `NotFoundError`, `InvalidValueError`."""
        batch = await self._database.run(partial(table.cancel, owner=owner, batch_id=batch_id))
        self._feeder.nudge()
        return batch

    def _create(self, db: sqlite3.Connection, wish: Wish) -> Batch:
        batch = table.create(db, wish)
        if (count := table.count_open(db, wish.owner)) > self._max_open:
            # Undoes the batch as well.
            raise StorageFullError(
                f"There are {count - 1} batches of this key that have not ended, and at most "
                f"{self._max_open} may be (--max-batches-per-key)."
            )
        return batch

    async def _look_around(self) -> None:
        turn = 0
        while True:
            try:
                if not turn % _TIDY_EVERY:
                    await self._tidy()
                await self._look()
            except Exception:
                # What is shown may be old; what is stored is not touched by it.
                logger.exception("the store could not be looked at")
            turn += 1
            await asyncio.sleep(_LOOK_S)

    async def _tidy(self) -> None:
        if gone := await self.files.remove_expired():
            logger.info("%d files have expired", gone)
        if self._keep_s:
            await self._database.run(partial(table.forget_old, keep_s=self._keep_s))

    async def _look(self) -> None:
        files, stored = await self.files.usage()
        self._seen = Seen(
            await self._database.run(table.counts),
            await self._database.run(table.lines_to_do),
            files,
            stored,
            await asyncio.to_thread(self._folder.free_bytes),
        )
