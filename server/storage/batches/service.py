"""Files and batches: operations of the routes, and the background work."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from starlette.types import ASGIApp

from server import bounds
from server.admission import Admission
from server.errors import InvalidValueError, NotFoundError, StorageFullError, describe
from server.host.tasks import background_task
from server.lifecycle import Lifecycle
from server.settings import ServerSettings
from server.storage.batches import table
from server.storage.batches.batch import Api, Batch, BatchRequest
from server.storage.batches.bodies import WINDOW_S
from server.storage.batches.input_lines import InputLine, LineRules, read_lines
from server.storage.batches.message_requests import WrittenInput, body_error
from server.storage.batches.results import ResultFiles
from server.storage.batches.runner import BatchRunner, LineCounts
from server.storage.batches.spare_rows import DecodeTimes, SpareRows
from server.storage.files import INPUT, FileStore
from server.storage.jobs import BATCHES
from server.storage.rows import Page
from server.storage.store import Store
from server.wire.endpoint import Endpoint

logger = logging.getLogger(__name__)

_EXPIRE_EVERY = 12
"""Refreshes between two deletions of expired data."""
_GAUGES = (
    *("rbln_batch_lines_to_do", "rbln_stored_files", "rbln_stored_bytes"),
    "rbln_storage_free_bytes",
)


class BatchService:
    """Everything behind /v1/files, /v1/batches and /v1/messages/batches."""

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
        self._message_rules = replace(rules, endpoint=Endpoint.MESSAGES.value)
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

    async def create_messages(self, owner: str, lines: Sequence[bytes]) -> Batch:
        """Create a batch for /v1/messages and its input file.

        Raises `InvalidValueError` for the first invalid line, `BodyTooLargeError`,
        `StorageFullError`.
        """
        file = await self.files.create(owner, WrittenInput(lines), lambda _: (INPUT, None))
        request = BatchRequest(owner, Endpoint.MESSAGES.value, file.id, WINDOW_S, keep_s=0)
        try:
            valid = await asyncio.to_thread(self._read_messages, self.files.content_path(file.id))
            batch = await self._database.run(self._begin, request, valid)
        except Exception:
            await self.files.delete(owner, file.id)
            raise
        self._runner.wake()
        return batch

    async def get(self, owner: str, batch_id: str, api: Api) -> Batch:
        """Return a batch. Raises `NotFoundError`."""
        return await self._database.read(table.get, owner, batch_id, api)

    async def list_batches(self, owner: str, page: Page, api: Api) -> tuple[list[Batch], bool]:
        """Return a page of the owner's batches, and whether more follow."""
        return await self._database.read(table.list_page, owner, page, api)

    async def cancel(self, owner: str, batch_id: str, api: Api) -> Batch:
        """Start the cancellation of a batch. Raises `NotFoundError`, `InvalidValueError`."""
        batch = await self._database.run(table.cancel, owner, batch_id, api)
        self._runner.wake()
        return batch

    async def delete(self, owner: str, batch_id: str, api: Api) -> None:
        """Delete an ended batch and its files. Raises the errors of `cancel`."""
        batch = await self._database.run(table.delete, owner, batch_id, api)
        for file_id in (batch.input_file, *batch.result_files):
            # The client may have deleted the file.
            with suppress(NotFoundError):
                await self.files.delete(owner, file_id)

    async def result_paths(self, owner: str, batch_id: str, api: Api) -> list[Path]:
        """Return the paths of the result files of a batch. Raises the errors of `cancel`."""
        batch = await self.get(owner, batch_id, api)
        if batch.is_open:
            raise InvalidValueError(
                f"The batch {batch.id} has no results: it has not ended.", param="batch_id"
            )
        paths = [self.files.content_path(file_id) for file_id in batch.result_files]
        if not all(path.is_file() for path in paths):
            raise NotFoundError(
                f"The results of {describe(batch_id)} were deleted.", param="batch_id"
            )
        return paths

    def _create(self, db: sqlite3.Connection, request: BatchRequest) -> Batch:
        batch = table.create(db, request)
        if (count := BATCHES.count_open(db, request.owner)) > self._max_open:
            # The exception rolls the new batch back.
            raise StorageFullError(
                f"This key has {count - 1} batches that have not ended; at most {self._max_open} "
                "are allowed."
            )
        return batch

    def _begin(
        self, db: sqlite3.Connection, request: BatchRequest, lines: Sequence[InputLine]
    ) -> Batch:
        """Create a batch with validated lines, whose ids may still be duplicates."""
        batch = self._create(db, request)
        table.add_lines(db, batch.id, lines)
        if errors := table.duplicates(db, batch.id, 1):
            raise body_error(errors[0])
        models = {line.model for line in lines}
        table.begin(db, batch.id, models.pop() if len(models) == 1 else None)
        return table.reload(db, batch.id)

    def _read_messages(self, path: Path) -> list[InputLine]:
        lines = []
        for line in read_lines(path, self._message_rules):
            if not isinstance(line, InputLine):
                raise body_error(line)
            lines.append(line)
        return lines

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
