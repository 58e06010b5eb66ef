"""Brings batches from their input to their answers, a line where there is a row to spare.

Invariants: a line runs at most once at a time, and is counted once, when its answer is on the
disk; whatever ends this process, lines without a counted answer run again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from starlette.types import ASGIApp

from server.batches import table
from server.batches.batch import Batch, LineError, Status
from server.batches.input_lines import InputLine, LineRules, body_of, read_lines
from server.batches.line_answers import answered, never_run
from server.batches.loopback import LoopbackResponse, post
from server.batches.results import ResultFiles
from server.batches.spare_rows import SpareRows
from server.batches.table import Answer, Line
from server.errors import NotFoundError, RequestError
from server.frontend import Endpoint
from server.request.record import InternalRequest
from server.storage.clock import ExpiryClock
from server.storage.database import Database
from server.storage.files import FileStore
from server.storage.quotas import StorageQuotas
from server.tiers.tier import Tier

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_PAUSE_S = 1.0
_SLICE = 1000
_SHOWN_ERRORS = 100
_COMES_BACK = (429, 503)
"""Not now: the line is asked again."""
_TRIES = 3
"""Of a line whose answer is a fault of ours."""
_FAULT = 500


@dataclass(slots=True)
class LineCounts:
    """Lines by result and tokens by kind, for the metrics."""

    lines: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False, slots=True)
class _Running:
    line: Line
    task: asyncio.Task[None]
    is_answered: bool = False
    """Whether it only waits for the disk."""


class BatchRunner:
    """Runs the lines of all batches. Used from the event loop."""

    def __init__(
        self,
        database: Database,
        files: FileStore,
        results: ResultFiles,
        rules: LineRules,
        spare: SpareRows,
        quotas: StorageQuotas,
        clock: ExpiryClock,
    ) -> None:
        """`rules` are those of any endpoint."""
        self._clock = clock
        self.full = False
        """Whether lines wait because nothing more may be stored."""
        self._quotas = quotas
        self._database = database
        self._files = files
        self._results = results
        self._rules = rules
        self._spare = spare
        self._app: ASGIApp | None = None
        self._running: dict[tuple[str, int], _Running] = {}
        self._answers: list[Answer] = []
        self._tries: Counter[tuple[str, int]] = Counter()
        self._wake = asyncio.Event()
        self._counts = LineCounts()

    @property
    def running(self) -> int:
        """How many lines are being answered."""
        return sum(not run.is_answered for run in self._running.values())

    def take_counts(self) -> LineCounts:
        """Return what was done since the last call."""
        counts, self._counts = self._counts, LineCounts()
        return counts

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    async def run(self, app: ASGIApp) -> None:
        """Work until cancelled; what runs then is put back."""
        self._app = app
        try:
            while True:
                await self._turn_safely()
        finally:
            for running in self._running.values():
                running.task.cancel()

    async def _turn_safely(self) -> None:
        self._wake.clear()
        pause_s: float | None = _PAUSE_S
        try:
            batches = await self._database.read(table.unfinished)
            # Without a batch there is nothing to look for: whoever makes one says so.
            pause_s = _TICK_S if batches else None
            # Free rows are filled before the answers go to the disk, which takes longer.
            for batch in batches:
                await self._advance(batch)
            await self._write()
        except Exception:
            # A fault with one batch must not be the end of all.
            logger.exception("batches: a turn failed")
        try:
            await asyncio.wait_for(self._wake.wait(), pause_s)
        except TimeoutError:
            return

    async def _write(self) -> None:
        """Put what was answered on the disk, all of it with one wait for the disk."""
        if not self._answers:
            return
        answers = list(self._answers)
        await self._results.add(answers)
        # Those that came meanwhile are for the next time.
        del self._answers[: len(answers)]
        for answer in answers:
            self._running.pop((answer.line.batch, answer.line.number), None)
            self._counts.lines["completed" if answer.succeeded else "failed"] += 1
            self._counts.tokens["prompt"] += answer.input_tokens
            self._counts.tokens["completion"] += answer.output_tokens
        # It may have been the last of a batch.
        self.wake()

    async def _advance(self, batch: Batch) -> None:
        if batch.status == "validating":
            await self._read_input(batch)
        elif batch.status == "finalizing":
            await self._results.end(batch, "completed")
        elif batch.status == "cancelling":
            await self._cut(batch, "cancelled")
        elif self._clock.now() >= batch.expires_at:
            await self._cut(batch, "expired")
        elif not batch.unfinished:
            await self._database.run(partial(table.move, batch_id=batch.id, status="finalizing"))
            self.wake()
        else:
            await self._start_lines(batch)

    async def _read_input(self, batch: Batch) -> None:
        """Note the lines of the input, or fail the batch with what is wrong with them."""
        await self._database.run(partial(table.forget_lines, batch_id=batch.id))
        try:
            file = await self._files.get(batch.owner, batch.input_file)
        except Exception as error:  # noqa: BLE001 (deleted, or gone from the disk)
            await self._fail(batch, [_missing(str(error))])
            return
        rules = LineRules(batch.endpoint, self._rules.max_lines, self._rules.max_bytes)
        errors, model = await self._note_lines(batch, self._files.content_path(file.id), rules)
        if errors:
            await self._fail(batch, errors)
            return
        await self._database.run(partial(table.begin, batch_id=batch.id, model=model))
        self.wake()

    async def _note_lines(
        self, batch: Batch, path: Path, rules: LineRules
    ) -> tuple[list[LineError], str | None]:
        errors: list[LineError] = []
        models: set[str | None] = set()
        lines = read_lines(path, rules)
        while found := await asyncio.to_thread(_taken, lines):
            good = [line for line in found if isinstance(line, InputLine)]
            errors += [line for line in found if not isinstance(line, InputLine)]
            errors += await self._database.run(
                partial(table.add_lines, batch_id=batch.id, lines=good)
            )
            models |= {line.model for line in good}
            if len(errors) >= _SHOWN_ERRORS:
                break
        return errors[:_SHOWN_ERRORS], models.pop() if len(models) == 1 else None

    async def _fail(self, batch: Batch, errors: list[LineError]) -> None:
        errors.sort(key=lambda error: error["line"] or 0)
        await self._database.run(partial(table.fail, batch_id=batch.id, errors=errors))
        logger.info("%s failed: %s", batch.id, errors[0]["message"])

    async def _start_lines(self, batch: Batch) -> None:
        free = self._spare.limit() - self.running
        if free <= 0 or self._results.full:
            return
        self.full = not await self._database.read(self._quotas.has_room)
        if self.full:
            return
        busy = [number for batch_id, number in self._running if batch_id == batch.id]
        for line in await self._database.read(
            partial(table.waiting_lines, batch_id=batch.id, busy=busy, limit=free)
        ):
            task = asyncio.create_task(self._answer(batch, line))
            self._running[line.batch, line.number] = _Running(line, task)

    async def _answer(self, batch: Batch, line: Line) -> None:
        place = (line.batch, line.number)
        try:
            answer = await self._ask(batch, line)
        except asyncio.CancelledError:
            self._running.pop(place, None)
            raise
        except Exception:
            logger.exception("batches: line %d of %s could not be asked", line.number, batch.id)
            self._running.pop(place, None)
            return
        self._tries[place] += answer.status >= _FAULT and answer.status not in _COMES_BACK
        if answer.status in _COMES_BACK or 0 < self._tries[place] < _TRIES:
            self._running.pop(place, None)
            return
        del self._tries[place]
        self._running[place].is_answered = True
        self._answers.append(answered(line, answer))
        self.wake()

    async def _ask(self, batch: Batch, line: Line) -> LoopbackResponse:
        assert self._app is not None
        path = self._files.content_path(batch.input_file)
        try:
            body = await asyncio.to_thread(_read_body, path, line)
        except RequestError as error:
            return LoopbackResponse(
                error.status,
                "",
                error.anthropic_body() if Endpoint(batch.endpoint).anthropic else error.body(),
            )
        return await post(
            self._app, batch.endpoint, body, InternalRequest(batch.owner, (Tier.FLEX,))
        )

    async def _cut(self, batch: Batch, status: Status) -> None:
        """End a batch before its end: what runs is put back, and what has not run says why."""
        mine = [run for run in self._running.values() if run.line.batch == batch.id]
        for running in mine:
            running.task.cancel()
        if mine:
            await asyncio.wait({running.task for running in mine})
            await self._write()
        while lines := await self._database.read(
            partial(table.waiting_lines, batch_id=batch.id, busy=(), limit=_SLICE)
        ):
            await self._results.add([never_run(line, status) for line in lines])
        batch = await self._database.read(partial(table.reload, batch_id=batch.id))
        await self._results.end(batch, status)


def _taken(lines: Iterator[InputLine | LineError]) -> list[InputLine | LineError]:
    return list(islice(lines, _SLICE))


def _missing(message: str) -> LineError:
    return LineError(code="input_file_missing", line=None, message=message, param="input_file_id")


def _read_body(path: Path, line: Line) -> bytes:
    """Return what a line asks. Raises the `RequestError` of what is wrong with it."""
    try:
        with path.open("rb") as file:
            file.seek(line.place)
            return body_of(file.read(line.bytes))
    except FileNotFoundError:
        raise NotFoundError(
            "The batch's input file was deleted before this line ran.", param="input_file_id"
        ) from None
