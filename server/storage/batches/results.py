"""Result files of open batches: results are appended, synchronised and then counted.

    <data-dir>/parts/<batch>.output   responses with status 200
    <data-dir>/parts/<batch>.error    other responses

Invariant: all bytes that the database counts are on the disk. Bytes behind them were left by a
crash and are truncated before the next write, so no line has two results.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from server.storage.batches import table
from server.storage.batches.batch import Batch, Status
from server.storage.batches.line_results import LineResult
from server.storage.database import Database
from server.storage.files import OUTPUT, StoredFile
from server.storage.folder import DataFolder

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
            self._part(batch.id, kind).name: size
            for batch in batches
            for kind, size in batch.result_bytes.items()
        }
        await asyncio.to_thread(self._truncate_parts, known)

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

    async def end(self, batch: Batch, status: Status) -> None:
        """Turn the result parts into files and end the batch."""
        files = []
        for kind, size in batch.result_bytes.items():
            if size:
                file = _file_of(batch, kind, size, self._keep_s)
                part = self._part(batch.id, kind)
                await asyncio.to_thread(self._folder.keep, part, file.id)
                files.append(file)
        await self._database.run(table.end, batch, status, files)

    def _part(self, batch_id: str, kind: str) -> Path:
        return self._folder.parts / f"{batch_id}.{kind}"

    def _truncate_parts(self, known: Mapping[str, int]) -> None:
        for part in self._folder.parts.iterdir():
            if part.name not in known:
                part.unlink(missing_ok=True)
            elif part.stat().st_size > known[part.name]:
                os.truncate(part, known[part.name])

    def _append(self, results: Sequence[LineResult], batches: Sequence[Batch]) -> None:
        self._folder.require(sum(len(result.text) for result in results))
        self._truncate_uncounted(batches)
        parts: dict[Path, list[bytes]] = defaultdict(list)
        for result in results:
            path = self._part(result.line.batch, result.kind)
            parts[path].append(result.text)
        for path, texts in parts.items():
            with path.open("ab") as file:
                file.writelines(texts)
                file.flush()
                os.fsync(file.fileno())

    def _truncate_uncounted(self, batches: Sequence[Batch]) -> None:
        """Truncate uncounted bytes of an earlier attempt."""
        for batch in batches:
            for kind, size in batch.result_bytes.items():
                path = self._part(batch.id, kind)
                if path.exists():
                    os.truncate(path, size)


def _file_of(batch: Batch, kind: str, size: int, keep_s: int) -> StoredFile:
    """Return the row of a result file; equal for repeated calls, so that `end` can be repeated."""
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
