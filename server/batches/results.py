"""The answers of lines: appended to a file, synchronised, and only then counted.

    <data-dir>/parts/<batch>.output   answers with status 200
    <data-dir>/parts/<batch>.error    the others

Invariant: the bytes that the database counts are there; what lies behind them was cut off by a
crash and is dropped before the next answer, so that no line is there twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from server.batches import table
from server.batches.batch import Batch, Status
from server.batches.table import Answer
from server.storage.database import Database
from server.storage.files import OUTPUT, StoredFile
from server.storage.folder import DataFolder

logger = logging.getLogger(__name__)

_PAUSE_S = 5.0


class ResultFiles:
    """Used by one task at a time."""

    def __init__(self, database: Database, folder: DataFolder, keep_s: int) -> None:
        self._database = database
        self._folder = folder
        self._keep_s = keep_s
        self.full = False
        """Whether answers wait for room on the disk."""

    async def recover(self, batches: Sequence[Batch]) -> None:
        """Drop what was written and not counted, and what belongs to no batch."""
        known = {
            self._part(batch.id, kind).name: size
            for batch in batches
            for kind, size in batch.result_bytes.items()
        }
        for part in self._folder.parts.iterdir():
            if part.name not in known:
                part.unlink(missing_ok=True)
            elif part.stat().st_size > known[part.name]:
                os.truncate(part, known[part.name])

    async def add(self, answers: Sequence[Answer]) -> None:
        """Write answers and count them; waits for as long as the disk has no room."""
        while True:
            try:
                self._folder.require(sum(len(answer.text) for answer in answers))
                await self._back_to_counted(answers)
                await asyncio.to_thread(self._append, answers)
                await self._database.run(partial(table.note_written, answers=answers))
                break
            except Exception as error:  # noqa: BLE001 (a full disk has many faces)
                self.full = True
                logger.error("answers of batches wait for the disk: %s", error)
                await asyncio.sleep(_PAUSE_S)
        self.full = False

    async def end(self, batch: Batch, status: Status) -> None:
        """Make the answers files of their own, and the batch one that ended."""
        files = []
        for kind, size in batch.result_bytes.items():
            if size:
                file = _file_of(batch, kind, size, self._keep_s)
                part = self._part(batch.id, kind)
                await asyncio.to_thread(self._folder.keep, part, file.id)
                files.append(file)
        await self._database.run(partial(table.end, batch=batch, status=status, files=files))

    def _part(self, batch_id: str, kind: str) -> Path:
        return self._folder.parts / f"{batch_id}.{kind}"

    def _append(self, answers: Sequence[Answer]) -> None:
        parts: dict[Path, list[bytes]] = defaultdict(list)
        for answer in answers:
            path = self._part(answer.line.batch, answer.kind)
            parts[path].append(answer.text)
        for path, texts in parts.items():
            with path.open("ab") as file:
                file.writelines(texts)
                file.flush()
                os.fsync(file.fileno())

    async def _back_to_counted(self, answers: Sequence[Answer]) -> None:
        """Drop what an earlier try has left behind the bytes that are counted."""
        for batch_id in {answer.line.batch for answer in answers}:
            batch = await self._database.read(partial(table.reload, batch_id=batch_id))
            for kind, size in batch.result_bytes.items():
                path = self._part(batch_id, kind)
                if path.exists():
                    os.truncate(path, size)


def _file_of(batch: Batch, kind: str, size: int, keep_s: int) -> StoredFile:
    """The file of a batch's answers; the same one if a crash came between its two steps."""
    ended = batch.moments.get("finalizing_at", batch.moments.get("cancelling_at", batch.created_at))
    kept = batch.keep_s or keep_s
    return StoredFile(
        id=f"file-{batch.id.removeprefix('batch_')}-{kind}",
        owner=batch.owner,
        purpose=OUTPUT,
        name=f"{batch.id}_{kind}.jsonl",
        bytes=size,
        created_at=ended,
        expires_at=ended + kept if kept else None,
    )
