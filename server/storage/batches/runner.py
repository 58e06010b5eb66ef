"""Runner of batches: reads their input, runs lines in spare rows and writes the results.

Invariants: a line runs at most once at a time. It is counted once, when its result is on the disk.
After a crash or restart, lines without a counted result run again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from starlette.types import ASGIApp

from server.errors import NotFoundError, RequestError
from server.request.options import Tier
from server.request.record import InternalRequest
from server.storage.batches import table
from server.storage.batches.batch import Batch, LineError, Status
from server.storage.batches.input_lines import InputLine, LineRules, body_of, read_lines
from server.storage.batches.line_results import Line, LineResult, never_run, result_of
from server.storage.batches.results import ResultFiles
from server.storage.batches.spare_rows import SpareRows
from server.storage.files import FileStore
from server.storage.jobs import JobLoop
from server.storage.loopback import LoopbackResponse, post_until_taken
from server.storage.store import Store

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_SLICE = 1000
_MAX_READERS = 4
_SHOWN_ERRORS = 100
_MAX_FAULTS = 3
"""Attempts of a line whose response is a server error."""
_FAULT = 500
_FAULT_PAUSE_S = 0.5


@dataclass(slots=True)
class LineCounts:
    """Numbers of lines by result and of tokens by kind, for the metrics."""

    lines: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False, slots=True)
class _RunningLine:
    line: Line
    task: asyncio.Task[None]
    is_answered: bool = False
    """True once only the write of its result is left."""


class BatchRunner:
    """Runs the lines of all batches. Used from the event loop."""

    def __init__(
        self,
        store: Store,
        files: FileStore,
        results: ResultFiles,
        rules: LineRules,
        spare: SpareRows,
    ) -> None:
        """`rules` are those for lines of any endpoint."""
        self.quota_reached = False
        """True while lines wait because `--max-stored-bytes` is reached."""
        self._clock = store.clock
        self._quotas = store.quotas
        self._database = store.database
        self._files = files
        self._results = results
        self._rules = rules
        self._spare = spare
        self._app: ASGIApp | None = None
        self._running: dict[tuple[str, int], _RunningLine] = {}
        self._unwritten: list[LineResult] = []
        # Read the input of batches, by id; other batches run meanwhile.
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._loop = JobLoop("batches", self._turn)
        self._counts = LineCounts()
        self.wake = self._loop.wake

    @property
    def running(self) -> int:
        """Number of lines that wait for their response."""
        return sum(not run.is_answered for run in self._running.values())

    def take_counts(self) -> LineCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, LineCounts()
        return counts

    async def run(self, app: ASGIApp) -> None:
        """Run lines through `app` until cancelled."""
        self._app = app
        try:
            await self._loop.run()
        finally:
            for running in self._running.values():
                running.task.cancel()
            for reader in self._readers.values():
                reader.cancel()

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
            self._counts.lines["completed" if result.succeeded else "failed"] += 1
            self._counts.tokens["prompt"] += result.input_tokens
            self._counts.tokens["completion"] += result.output_tokens
        # A batch may be complete now.
        self.wake()

    async def _advance(self, batch: Batch) -> None:
        if batch.id in self._readers:
            return
        if batch.status == "validating":
            if len(self._readers) < _MAX_READERS:
                self._readers[batch.id] = reader = asyncio.create_task(self._read_input(batch))
                reader.add_done_callback(lambda _: self.wake())
        elif batch.status == "finalizing":
            await self._results.end(batch, "completed")
        elif batch.status == "cancelling":
            await self._cut(batch, "cancelled")
        elif self._clock.now() >= batch.expires_at:
            await self._cut(batch, "expired")
        elif not batch.unfinished:
            await self._database.run(table.move, batch.id, "finalizing")
            self.wake()
        else:
            await self._start_lines(batch)

    async def _read_input(self, batch: Batch) -> None:
        """Insert the lines of the input, or fail the batch with their errors."""
        await self._database.run(table.delete_lines, batch.id)
        try:
            file = await self._files.get(batch.owner, batch.input_file)
        except Exception as error:  # noqa: BLE001 (deleted, or gone from the disk)
            await self._fail(batch, [_missing(str(error))])
            return
        rules = LineRules(batch.endpoint, self._rules.max_lines, self._rules.max_bytes)
        errors, model = await self._insert_lines(batch, self._files.content_path(file.id), rules)
        if errors:
            await self._fail(batch, errors)
            return
        await self._database.run(table.begin, batch.id, model)

    async def _insert_lines(
        self, batch: Batch, path: Path, rules: LineRules
    ) -> tuple[list[LineError], str | None]:
        """Return the first errors, and the model if all lines name the same one."""
        errors: list[LineError] = []
        models: set[str | None] = set()
        lines = read_lines(path, rules)
        while found := await asyncio.to_thread(_next_lines, lines):
            valid = [line for line in found if isinstance(line, InputLine)]
            errors += [line for line in found if not isinstance(line, InputLine)]
            await self._database.run(table.add_lines, batch.id, valid)
            models |= {line.model for line in valid}
            if len(errors) >= _SHOWN_ERRORS:
                break
        errors += await self._database.read(table.duplicates, batch.id, _SHOWN_ERRORS)
        errors.sort(key=lambda error: error["line"] or 0)
        return errors[:_SHOWN_ERRORS], models.pop() if len(models) == 1 else None

    async def _fail(self, batch: Batch, errors: list[LineError]) -> None:
        await self._database.run(table.fail, batch.id, errors)
        logger.info("%s failed: %s", batch.id, errors[0]["message"])

    async def _start_lines(self, batch: Batch) -> None:
        free = self._spare.limit() - self.running
        if free <= 0 or self._results.full:
            return
        self.quota_reached = not await self._database.read(self._quotas.has_room)
        if self.quota_reached:
            return
        busy = [number for batch_id, number in self._running if batch_id == batch.id]
        for line in await self._database.read(table.waiting_lines, batch.id, busy, free):
            task = asyncio.create_task(self._answer(batch, line))
            self._running[line.batch, line.number] = _RunningLine(line, task)

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
        self._unwritten.append(result_of(line, response))
        self.wake()

    async def _send(self, batch: Batch, line: Line) -> LoopbackResponse:
        assert self._app is not None
        path = self._files.content_path(batch.input_file)
        try:
            body = await asyncio.to_thread(_read_body, path, line)
        except RequestError as error:
            return LoopbackResponse(error.status, "", error.body())
        internal = InternalRequest(batch.owner, (Tier.FLEX,))
        response = await post_until_taken(self._app, batch.endpoint, body, internal)
        for _ in range(1, _MAX_FAULTS):
            if response.status < _FAULT:
                break
            await asyncio.sleep(_FAULT_PAUSE_S)
            response = await post_until_taken(self._app, batch.endpoint, body, internal)
        return response

    async def _cut(self, batch: Batch, status: Status) -> None:
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


def _next_lines(lines: Iterator[InputLine | LineError]) -> list[InputLine | LineError]:
    return list(islice(lines, _SLICE))


def _missing(message: str) -> LineError:
    return LineError(code="input_file_missing", line=None, message=message, param="input_file_id")


def _read_body(path: Path, line: Line) -> bytes:
    """Return the request body of a line. Raises a `RequestError`."""
    try:
        with path.open("rb") as file:
            file.seek(line.place)
            return body_of(file.read(line.bytes))
    except FileNotFoundError:
        raise NotFoundError(
            "The batch's input file was deleted before this line ran.", param="input_file_id"
        ) from None
