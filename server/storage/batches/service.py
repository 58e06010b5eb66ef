"""Files and batches: operations of the routes, and the background work."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from server import bounds
from server.admission import Admission
from server.errors import StorageFullError
from server.host.tasks import background_task
from server.lifecycle import Lifecycle
from server.settings import ServerSettings
from server.storage.batches import table
from server.storage.batches.batch import Batch, BatchRequest
from server.storage.batches.input_lines import LineRules
from server.storage.batches.results import ResultFiles
from server.storage.batches.runner import BatchRunner, LineCounts
from server.storage.batches.spare_rows import DecodeTimes, SpareRows
from server.storage.files import FileStore
from server.storage.jobs import BATCHES
from server.storage.rows import Page
from server.storage.store import Store

logger = logging.getLogger(__name__)

_EXPIRE_EVERY = 12
"""Refreshes between two deletions of expired data."""
_GAUGES = (
    *("rbln_batch_lines_to_do", "rbln_stored_files", "rbln_stored_bytes"),
    "rbln_storage_free_bytes",
)


class BatchService:
    """Everything behind /v1/files and /v1/batches."""

    def __init__(
        self,
        store: Store,
        settings: ServerSettings,
        lifecycle: Lifecycle,
        admission: Admission,
        decode_times: Callable[[], DecodeTimes],
    ) -> None:
        """Create the service. `decode_times` is called in another thread."""
        self._folder, self._database = store.folder, store.database
        self._keep_s = settings.file_retention_s
        self._max_open = bounds.MAX_BATCHES_PER_KEY
        self.files = FileStore(
            store, settings.max_file_bytes, settings.file_retention_s, table.input_files_in_use
        )
        self._results = ResultFiles(self._database, self._folder, settings.file_retention_s)
        rules = LineRules("", settings.max_batch_lines, settings.max_body_bytes)
        self._spare, self._decode_times = SpareRows(lifecycle, admission), decode_times
        self._clock = store.clock
        self._runner = BatchRunner(store, self.files, self._results, rules, self._spare)
        self._refreshes = 0
        self.statuses: Mapping[str, int] = BATCHES.no_rows()
        """Numbers of batches by status, at the last refresh."""
        self._stored: dict[str, float] = dict.fromkeys(_GAUGES, 0)

    def gauges(self) -> dict[str, float]:
        """Return gauges by the names of metrics."""
        return {
            **self._stored,
            "rbln_batch_lines_running": self._runner.running,
            "rbln_storage_full": self._results.full or self._runner.quota_reached,
        }

    def take_counts(self) -> LineCounts:
        """Return the counts since the last call."""
        return self._runner.take_counts()

    @asynccontextmanager
    async def working(self, app: ASGIApp) -> AsyncIterator[None]:
        """Run lines through `app` for the length of the block."""
        # Before the first request, since an upload in progress has no row either.
        await self.files.remove_unknown()
        await self._results.recover(await self._database.read(table.unfinished))
        async with background_task(self._runner.run(app)):
            yield

    async def create(self, request: BatchRequest) -> Batch:
        """Create a batch. Raises `NotFoundError`, `InvalidValueError`, `StorageFullError`."""
        batch = await self._database.run(self._create, request)
        self._runner.wake()
        return batch

    async def get(self, owner: str, batch_id: str) -> Batch:
        """Return a batch. Raises `NotFoundError`."""
        return await self._database.read(table.get, owner, batch_id)

    async def list_batches(self, owner: str, page: Page) -> tuple[list[Batch], bool]:
        """Return a page of the owner's batches, and whether more follow."""
        return await self._database.read(table.list_page, owner, page)

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Start the cancellation of a batch. Raises `NotFoundError`, `InvalidValueError`."""
        batch = await self._database.run(table.cancel, owner, batch_id)
        self._runner.wake()
        return batch

    def _create(self, db: sqlite3.Connection, request: BatchRequest) -> Batch:
        batch = table.create(db, request)
        if (count := BATCHES.count_open(db, request.owner)) > self._max_open:
            # The exception rolls the new batch back.
            raise StorageFullError(
                f"This key has {count - 1} batches that have not ended; at most {self._max_open} "
                "are allowed."
            )
        return batch

    async def refresh(self) -> None:
        """Refresh the gauges; every `_EXPIRE_EVERY` calls, delete expired data first."""
        if not self._refreshes % _EXPIRE_EVERY:
            await self._delete_expired()
        self._refreshes += 1
        self.statuses = await self._database.read(BATCHES.count_by_status)
        lines = await self._database.read(table.lines_to_do)
        free = await asyncio.to_thread(self._folder.free_bytes)
        values = (lines, *await self.files.usage(), free)
        self._stored = dict(zip(_GAUGES, values, strict=True))
        if lines:
            self._spare.set_decode_times(await asyncio.to_thread(self._decode_times))

    async def _delete_expired(self) -> None:
        now = self._clock.now()
        if count := await self.files.remove_expired(now):
            logger.info("%d files have expired", count)
        if self._keep_s:
            await self._database.run(table.delete_old, self._keep_s, now)
