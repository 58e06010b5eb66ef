"""Files and batches: operations of the routes, and the background work.

The runner reads the input of batches, runs lines in rows that clients leave free, and writes the
results, which are appended, synchronised and then counted:

    <data-dir>/parts/<batch>.output   responses with status 200
    <data-dir>/parts/<batch>.error    other responses

Invariants: all bytes that the database counts are on the disk. Bytes behind them were left by a
crash and are truncated before the next write, so no line has two results. A line runs at most once
at a time. It is counted once, when its result is on the disk. After a crash or restart, lines
without a counted result run again.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import os
import sqlite3
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from starlette.types import ASGIApp

from server import bounds
from server.admission import Admission
from server.errors import NotFoundError, RequestError, StorageFullError
from server.host.tasks import background_task
from server.lifecycle import Lifecycle, ServicePhase
from server.request.options import Tier
from server.request.record import InternalRequest
from server.settings import ServerSettings
from server.storage import batch_table as table
from server.storage.batch_table import (
    Batch,
    CreateBatchBody,
    InputLine,
    Line,
    LineError,
    LineResult,
    LineRules,
    get_body,
    make_result,
    never_run,
    read_lines,
)
from server.storage.database import BATCHES, Database, DataFolder, Page, Store, get_usage
from server.storage.files import OUTPUT, FileStore, StoredFile
from server.storage.jobs import JobLoop, LoopbackResponse, post_until_accepted

logger = logging.getLogger(__name__)

_PAUSE_S = 5.0


class ResultFiles:
    """Result files of all open batches. Used by one task at a time."""

    def __init__(self, database: Database, folder: DataFolder, keep_s: int) -> None:
        self._database = database
        self._folder = folder
        self._keep_s = keep_s
        self.full = False
        """True while results wait for disk space."""

    async def recover(self, batches: Sequence[Batch]) -> None:
        """Truncate uncounted results and delete parts that belong to no batch."""
        known = {
            self._part(batch.id, kind): size
            for batch in batches
            for kind, size in batch.result_bytes.items()
        }

        def truncate() -> None:
            for part in self._folder.parts.iterdir():
                if part not in known:
                    part.unlink(missing_ok=True)
                elif part.stat().st_size > known[part]:
                    os.truncate(part, known[part])

        await asyncio.to_thread(truncate)

    async def add(self, results: Sequence[LineResult]) -> None:
        """Write and count results; retries every 5 s while the disk is full or fails."""
        while True:
            try:
                ids = {result.line.batch for result in results}
                batches = [await self._database.read(table.reload, id_) for id_ in ids]
                await asyncio.to_thread(self._append, results, batches)
                await self._database.run(table.count_results, results)
                break
            except Exception as error:  # noqa: BLE001 (disk errors have many types)
                self.full = True
                logger.error("batches: results wait for the disk: %s", error)
                await asyncio.sleep(_PAUSE_S)
        self.full = False

    async def end(self, batch: Batch, status: str) -> None:
        """Turn the result parts into files and end the batch."""
        files = []
        for kind, size in batch.result_bytes.items():
            if size:
                # Equal for repeated calls, so that `end` can be repeated.
                moments = batch.moments
                ended = moments.get("finalizing_at", moments.get("cancelling_at", batch.created_at))
                kept = batch.keep_s or self._keep_s
                file = StoredFile(
                    id=f"file-{batch.id.removeprefix('batch_')}-{kind}",
                    owner=batch.owner,
                    purpose=OUTPUT,
                    name=f"{batch.id}_{kind}.jsonl",
                    bytes=size,
                    created_at=ended,
                    expires_at=ended + kept if kept else None,
                )
                part = self._part(batch.id, kind)
                await asyncio.to_thread(self._folder.keep, part, file.id)
                files.append(file)
        await self._database.run(table.end, batch, status, files)

    def _part(self, batch_id: str, kind: str) -> Path:
        return self._folder.parts / f"{batch_id}.{kind}"

    def _append(self, results: Sequence[LineResult], batches: Sequence[Batch]) -> None:
        self._folder.require(sum(len(result.text) for result in results))
        # Uncounted bytes are those of an earlier attempt.
        for batch in batches:
            for kind, size in batch.result_bytes.items():
                path = self._part(batch.id, kind)
                if path.exists():
                    os.truncate(path, size)
        parts: dict[Path, list[bytes]] = defaultdict(list)
        for result in results:
            path = self._part(result.line.batch, result.kind)
            parts[path].append(result.text)
        for path, texts in parts.items():
            with path.open("ab") as file:
                file.writelines(texts)
                file.flush()
                os.fsync(file.fileno())


DecodeTimes = Mapping[int, tuple[int, float]]
"""Number of decode steps and their total seconds, by bucket."""
_LEAST_STEPS = 200
_LEAST_GAIN = 1.1
"""Tokens/s that a smaller bucket needs, relative to the largest; step times vary as much."""


def best_rows(buckets: Sequence[int], times: DecodeTimes) -> int:
    """Return the bucket with the most tokens/s; the largest one until measurements exist."""
    largest = buckets[-1]
    rates = {
        bucket: bucket * steps / seconds
        for bucket, (steps, seconds) in times.items()
        if bucket in buckets and steps >= _LEAST_STEPS and seconds > 0
    }
    best = max(rates, key=rates.__getitem__, default=largest)
    if largest not in rates or rates[best] < rates[largest] * _LEAST_GAIN:
        return largest
    return best


_TICK_S = 0.1
_SLICE = 1000
_MAX_READERS = 4
_SHOWN_ERRORS = 100
_MAX_FAULTS = 3
"""Attempts of a line whose response is a server error."""
_FAULT_PAUSE_S = 0.5


@dataclass(eq=False, slots=True)
class _RunningLine:
    line: Line
    task: asyncio.Task[None]
    is_answered: bool = False
    """True once only the write of its result is left."""


_EXPIRE_EVERY = 12
"""Refreshes between two deletions of expired data."""
_GAUGES = (
    "rbln_batch_lines_to_do",
    "rbln_stored_files",
    "rbln_stored_bytes",
    "rbln_storage_free_bytes",
)


class BatchService:
    """Everything behind /v1/files and /v1/batches. Used from the event loop."""

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
        self._clock, self._quotas = store.clock, store.quotas
        self._lifecycle, self._admission = lifecycle, admission
        self._keep_s = settings.file_retention_s
        # Those for lines of any endpoint.
        self._rules = LineRules("", settings.max_batch_lines, settings.max_body_bytes)
        self.files = FileStore(store, settings.max_file_bytes, self._keep_s)
        self._results = ResultFiles(self._database, self._folder, self._keep_s)
        self._decode_times = decode_times
        self._times: DecodeTimes = {}
        self._app: ASGIApp | None = None
        self._running: dict[tuple[str, int], _RunningLine] = {}
        self._unwritten: list[LineResult] = []
        # Read the input of batches, by id; other batches run meanwhile.
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._loop = JobLoop("batches", self._turn)
        self._lines, self._tokens = Counter[str](), Counter[str]()
        # Lines wait because `--max-stored-bytes` is reached.
        self._quota_reached = False
        self._refreshes = 0
        self.statuses: Mapping[str, int] = BATCHES.no_rows()
        """Numbers of batches by status, at the last refresh."""
        self._stored: dict[str, float] = dict.fromkeys(_GAUGES, 0)

    def gauges(self) -> dict[str, float]:
        return {
            **self._stored,
            "rbln_batch_lines_running": self._waiting_for_response(),
            "rbln_storage_full": self._results.full or self._quota_reached,
        }

    @asynccontextmanager
    async def working(self, app: ASGIApp) -> AsyncIterator[None]:
        """Run lines through `app` for the length of the block."""
        # Before the first request, since an upload in progress has no row either.
        await self.files.remove_unknown()
        await self._results.recover(await self._database.read(table.unfinished))
        async with background_task(self._run(app)):
            yield

    async def create(self, owner: str, body: CreateBatchBody, idempotency: str | None) -> Batch:
        """Create a batch. Raises `NotFoundError`, `InvalidValueError`, `StorageFullError`."""
        table.check_batch(body, idempotency)

        def create(db: sqlite3.Connection) -> Batch:
            batch = table.create(db, owner, body, idempotency)
            if (count := BATCHES.count_open(db, owner)) > bounds.MAX_BATCHES_PER_KEY:
                # The exception rolls the new batch back.
                raise StorageFullError(
                    f"This key has {count - 1} batches that have not ended; at most "
                    f"{bounds.MAX_BATCHES_PER_KEY} are allowed."
                )
            return batch

        batch = await self._database.run(create)
        self._loop.wake()
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
        self._loop.wake()
        return batch

    async def refresh(self) -> None:
        """Refresh the gauges; every `_EXPIRE_EVERY` calls, delete expired data first."""
        if not self._refreshes % _EXPIRE_EVERY:
            now = self._clock.now()
            if count := await self.files.remove_expired(now):
                logger.info("%d files have expired", count)
            if self._keep_s:
                await self._database.run(table.delete_old, self._keep_s, now)
        self._refreshes += 1
        self.statuses = await self._database.read(BATCHES.count_by_status)
        lines = await self._database.read(table.lines_to_do)
        free = await asyncio.to_thread(self._folder.free_bytes)
        values = (lines, *await self._database.read(get_usage, "files"), free)
        self._stored = dict(zip(_GAUGES, values, strict=True))
        if lines:
            self._times = await asyncio.to_thread(self._decode_times)

    # The lines of all batches.

    def _waiting_for_response(self) -> int:
        return sum(not run.is_answered for run in self._running.values())

    def take_counts(self) -> tuple[Counter[str], Counter[str]]:
        """Return the numbers of lines by result and of tokens by kind since the last call."""
        counts = self._lines, self._tokens
        self._lines, self._tokens = Counter[str](), Counter[str]()
        return counts

    async def _run(self, app: ASGIApp) -> None:
        """Run lines through `app` until cancelled."""
        self._app = app
        try:
            await self._loop.run()
        finally:
            for running in self._running.values():
                running.task.cancel()
            for reader in self._readers.values():
                reader.cancel()

    def _free_rows(self) -> int:
        """Return how many lines may run. The engine parks running lines beyond that.

        A decode graph computes all rows of its bucket. While n client requests run, the rows
        between n and the bucket size are padding; lines and client requests of the tier flex share
        them. Without client requests, lines fill the bucket with the most tokens/s.
        """
        if self._lifecycle.phase is not ServicePhase.READY:
            return 0
        buckets, online = self._admission.rows, self._admission.in_flight
        if not online:
            return best_rows(buckets, self._times) - self._admission.flex_in_flight
        index = bisect.bisect_left(buckets, online)
        spare = buckets[index] - online if index < len(buckets) else 0
        return spare - self._admission.flex_in_flight

    async def _turn(self) -> float | None:
        # Before the batches are read, which then have the status that a reader left.
        for name in [name for name, reader in self._readers.items() if reader.done()]:
            await self._readers.pop(name)
        batches = await self._database.read(table.unfinished)
        # Lines are started before results are written, because writing takes longer.
        for batch in batches:
            await self._advance(batch)
        await self._write()
        # A new batch wakes the loop.
        return _TICK_S if batches else None

    async def _write(self) -> None:
        """Write all new results, with one synchronisation of the disk."""
        if not self._unwritten:
            return
        results = list(self._unwritten)
        await self._results.add(results)
        # Results that came during the write stay for the next turn.
        del self._unwritten[: len(results)]
        for result in results:
            self._running.pop((result.line.batch, result.line.number), None)
            self._lines["completed" if result.succeeded else "failed"] += 1
            self._tokens["prompt"] += result.input_tokens
            self._tokens["completion"] += result.output_tokens
        # A batch may be complete now.
        self._loop.wake()

    async def _advance(self, batch: Batch) -> None:
        if batch.id in self._readers:
            return
        if batch.status == "validating":
            if len(self._readers) < _MAX_READERS:
                self._readers[batch.id] = reader = asyncio.create_task(self._read_input(batch))
                reader.add_done_callback(lambda _: self._loop.wake())
        elif batch.status == "finalizing":
            await self._results.end(batch, "completed")
        elif batch.status == "cancelling":
            await self._cut(batch, "cancelled")
        elif self._clock.now() >= batch.expires_at:
            await self._cut(batch, "expired")
        elif not batch.unfinished:
            await self._database.run(table.move, batch.id, "finalizing")
            self._loop.wake()
        else:
            free = self._free_rows() - self._waiting_for_response()
            if free <= 0 or self._results.full:
                return
            self._quota_reached = not await self._database.read(self._quotas.has_room)
            if self._quota_reached:
                return
            busy = [number for batch_id, number in self._running if batch_id == batch.id]
            for line in await self._database.read(table.waiting_lines, batch.id, busy, free):
                task = asyncio.create_task(self._answer(batch, line))
                self._running[line.batch, line.number] = _RunningLine(line, task)

    async def _read_input(self, batch: Batch) -> None:
        """Insert the lines of the input, or fail the batch with their errors."""
        await self._database.run(table.delete_lines, batch.id)
        try:
            file = await self.files.get(batch.owner, batch.input_file)
        except Exception as error:  # noqa: BLE001 (deleted, or gone from the disk)
            missing = LineError(
                code="input_file_missing", line=None, message=str(error), param="input_file_id"
            )
            await self._fail(batch, [missing])
            return
        errors: list[LineError] = []
        models: set[str | None] = set()
        rules = replace(self._rules, endpoint=batch.endpoint)
        lines = read_lines(self.files.content_path(file.id), rules)
        while found := await asyncio.to_thread(lambda: list(islice(lines, _SLICE))):
            valid = [line for line in found if isinstance(line, InputLine)]
            errors += [line for line in found if not isinstance(line, InputLine)]
            await self._database.run(table.add_lines, batch.id, valid)
            models |= {line.model for line in valid}
            if len(errors) >= _SHOWN_ERRORS:
                break
        errors += await self._database.read(table.duplicates, batch.id, _SHOWN_ERRORS)
        if errors:
            errors.sort(key=lambda error: error["line"] or 0)
            await self._fail(batch, errors[:_SHOWN_ERRORS])
            return
        # The batch shows a model if all lines name the same one.
        model = models.pop() if len(models) == 1 else None
        await self._database.run(table.begin, batch.id, model)

    async def _fail(self, batch: Batch, errors: list[LineError]) -> None:
        await self._database.run(table.fail, batch.id, errors)
        logger.info("%s failed: %s", batch.id, errors[0]["message"])

    async def _answer(self, batch: Batch, line: Line) -> None:
        key = (line.batch, line.number)
        try:
            response = await self._send(batch, line)
        except asyncio.CancelledError:
            self._running.pop(key, None)
            raise
        except Exception:
            logger.exception("batches: line %d of %s could not be sent", line.number, batch.id)
            self._running.pop(key, None)
            return
        self._running[key].is_answered = True
        self._unwritten.append(make_result(line, response))
        self._loop.wake()

    async def _send(self, batch: Batch, line: Line) -> LoopbackResponse:
        assert self._app is not None
        path = self.files.content_path(batch.input_file)

        def read_body() -> bytes:
            try:
                with path.open("rb") as file:
                    file.seek(line.place)
                    return get_body(file.read(line.bytes))
            except FileNotFoundError:
                raise NotFoundError(
                    "The batch's input file was deleted before this line ran.",
                    param="input_file_id",
                ) from None

        try:
            body = await asyncio.to_thread(read_body)
        except RequestError as error:
            return LoopbackResponse(error.status, "", error.body())
        internal = InternalRequest(batch.owner, (Tier.FLEX,))
        response = await post_until_accepted(self._app, batch.endpoint, body, internal)
        for _ in range(1, _MAX_FAULTS):
            if response.status < 500:
                break
            await asyncio.sleep(_FAULT_PAUSE_S)
            response = await post_until_accepted(self._app, batch.endpoint, body, internal)
        return response

    async def _cut(self, batch: Batch, status: str) -> None:
        """End a batch early: cancel its running lines and write a result for the others."""
        cancelled = [run for run in self._running.values() if run.line.batch == batch.id]
        for running in cancelled:
            running.task.cancel()
        if cancelled:
            await asyncio.wait({running.task for running in cancelled})
            await self._write()
        while lines := await self._database.read(table.waiting_lines, batch.id, (), _SLICE):
            await self._results.add([never_run(line, status) for line in lines])
        batch = await self._database.read(table.reload, batch.id)
        await self._results.end(batch, status)
