"""Files and batches of one server: what the routes ask, and what works on it meanwhile."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp

from server.admission import Admission
from server.batches import table
from server.batches.batch import Api, Batch, BatchRequest
from server.batches.bodies import WINDOW_S
from server.batches.input_lines import InputLine, LineRules, read_lines
from server.batches.message_requests import WrittenInput, refused
from server.batches.results import ResultFiles
from server.batches.runner import BatchRunner, LineCounts
from server.batches.spare_rows import DecodeTimes, SpareRows
from server.errors import InvalidValueError, NotFoundError, StorageFullError, describe
from server.frontend import Endpoint
from server.host.tasks import while_running
from server.lifecycle import Lifecycle
from server.settings import ServerSettings
from server.storage.files import INPUT, FileStore, Page
from server.storage.store import Store

logger = logging.getLogger(__name__)

_LOOK_S = 5.0
_TIDY_EVERY = 12


@dataclass(frozen=True, slots=True)
class StorageSnapshot:
    """What there is, a few seconds ago."""

    batches: dict[str, int] = field(default_factory=dict)
    lines_to_do: int = 0
    files: int = 0
    stored_bytes: int = 0
    free_bytes: int = 0


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
        """`decode_times` is called in another thread."""
        self._folder, self._database = store.folder, store.database
        self._keep_s = settings.file_retention_s
        self._max_open = settings.max_batches_per_key
        self.files = FileStore(
            *(self._database, self._folder, store.quotas),
            *(settings.max_file_bytes, settings.file_retention_s),
        )
        self._results = ResultFiles(self._database, self._folder, settings.file_retention_s)
        rules = LineRules("", settings.max_batch_lines, settings.max_body_bytes)
        self._message_rules = replace(rules, endpoint=Endpoint.MESSAGES.value)
        self._spare, self._decode_times = SpareRows(lifecycle, admission), decode_times
        self._clock = store.clock
        self._runner = BatchRunner(
            *(self._database, self.files, self._results, rules),
            *(self._spare, store.quotas, store.clock),
        )
        self._snapshot = StorageSnapshot()

    @property
    def statuses(self) -> Mapping[str, int]:
        """How many batches there are by status, a few seconds ago."""
        return self._snapshot.batches

    def gauges(self) -> dict[str, float]:
        """Return what there is, by the names of metrics."""
        snapshot = self._snapshot
        return {
            "rbln_batch_lines_to_do": snapshot.lines_to_do,
            "rbln_batch_lines_running": self._runner.running,
            "rbln_stored_files": snapshot.files,
            "rbln_stored_bytes": snapshot.stored_bytes,
            "rbln_storage_free_bytes": snapshot.free_bytes,
            "rbln_storage_full": self._results.full or self._runner.full,
        }

    def take_counts(self) -> LineCounts:
        """Return what was done since the last call."""
        return self._runner.take_counts()

    @asynccontextmanager
    async def working(self, app: ASGIApp) -> AsyncIterator[None]:
        """Answer lines through `app` for the length of the block."""
        # Before there are requests: an upload that has begun has no name either.
        await self.files.remove_unknown()
        await self._results.recover(await self._database.read(table.unfinished))
        async with while_running(self._runner.run(app)), while_running(self._look_around()):
            yield

    async def create(self, request: BatchRequest) -> Batch:
        """Begin a batch. Raises `NotFoundError`, `InvalidValueError`, `StorageFullError`."""
        batch = await self._database.run(partial(self._create, request=request))
        self._runner.wake()
        return batch

    async def create_messages(self, owner: str, lines: Sequence[bytes]) -> Batch:
        """Begin a batch of lines for /v1/messages, whose input is written here.

        Raises `InvalidValueError` for the first line that is wrong, `BodyTooLargeError`,
        `StorageFullError`.
        """
        file = await self.files.create(owner, WrittenInput(lines), lambda _: (INPUT, None))
        request = BatchRequest(owner, Endpoint.MESSAGES.value, file.id, WINDOW_S, keep_s=0)
        try:
            noted = await asyncio.to_thread(self._read_messages, self.files.content_path(file.id))
            batch = await self._database.run(partial(self._begin, request=request, lines=noted))
        except Exception:
            await self.files.delete(owner, file.id)
            raise
        self._runner.wake()
        return batch

    async def get(self, owner: str, batch_id: str, api: Api) -> Batch:
        """Return a batch. Raises `NotFoundError`."""
        find = partial(table.get, owner=owner, batch_id=batch_id, api=api)
        return await self._database.read(find)

    async def list_batches(self, owner: str, page: Page, api: Api) -> tuple[list[Batch], bool]:
        """Return a page of the owner's batches, and whether there are more."""
        return await self._database.read(partial(table.list_page, owner=owner, page=page, api=api))

    async def cancel(self, owner: str, batch_id: str, api: Api) -> Batch:
        """Ask for a batch's end. Raises `NotFoundError`, `InvalidValueError`."""
        batch = await self._database.run(
            partial(table.cancel, owner=owner, batch_id=batch_id, api=api)
        )
        self._runner.wake()
        return batch

    async def delete(self, owner: str, batch_id: str, api: Api) -> None:
        """Delete a batch that has ended, and its files. Raises what `cancel` raises."""
        batch = await self._database.run(
            partial(table.delete, owner=owner, batch_id=batch_id, api=api)
        )
        for file_id in (batch.input_file, *batch.answer_files):
            # The client may have deleted it before.
            with suppress(NotFoundError):
                await self.files.delete(owner, file_id)

    async def answers(self, owner: str, batch_id: str, api: Api) -> list[Path]:
        """Return where the answers of a batch lie. Raises what `cancel` raises."""
        batch = await self.get(owner, batch_id, api)
        if batch.is_open:
            raise InvalidValueError(
                f"The batch {batch.id} has not ended, and has no results yet.", param="batch_id"
            )
        paths = [self.files.content_path(file_id) for file_id in batch.answer_files]
        if not all(path.is_file() for path in paths):
            raise NotFoundError(
                f"The results of {describe(batch_id)} were deleted.", param="batch_id"
            )
        return paths

    def _create(self, db: sqlite3.Connection, request: BatchRequest) -> Batch:
        batch = table.create(db, request)
        if (count := table.count_open(db, request.owner)) > self._max_open:
            # Undoes the batch as well.
            raise StorageFullError(
                f"There are {count - 1} batches of this key that have not ended, and at most "
                f"{self._max_open} may be (--max-batches-per-key)."
            )
        return batch

    def _begin(
        self, db: sqlite3.Connection, request: BatchRequest, lines: Sequence[InputLine]
    ) -> Batch:
        """Make a batch whose lines are known to be fine, but perhaps for their ids."""
        batch = self._create(db, request)
        if errors := table.add_lines(db, batch.id, lines):
            raise refused(errors[0])
        models = {line.model for line in lines}
        table.begin(db, batch.id, models.pop() if len(models) == 1 else None)
        return table.reload(db, batch.id)

    def _read_messages(self, path: Path) -> list[InputLine]:
        lines = []
        for line in read_lines(path, self._message_rules):
            if not isinstance(line, InputLine):
                raise refused(line)
            lines.append(line)
        return lines

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
        now = self._clock.now()
        if gone := await self.files.remove_expired(now):
            logger.info("%d files have expired", gone)
        if self._keep_s:
            await self._database.run(partial(table.forget_old, keep_s=self._keep_s, now=now))

    async def _look(self) -> None:
        files, stored = await self.files.usage()
        self._snapshot = StorageSnapshot(
            await self._database.read(table.counts),
            await self._database.read(table.lines_to_do),
            files,
            stored,
            await asyncio.to_thread(self._folder.free_bytes),
        )
        if self._snapshot.lines_to_do:
            self._spare.learn(await asyncio.to_thread(self._decode_times))
