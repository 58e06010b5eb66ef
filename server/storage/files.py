"""Files of clients: contents stored by id, with an owner, a quota and an expiry.

An upload is one file in a multipart form with a few fields. Memory holds one chunk and the fields.
Chunks are yielded as they arrive, so fields after the file are known only once it has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request
from typing_extensions import TypedDict

from server.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    InvalidValueError,
    MediaTypeError,
    MissingFieldError,
    describe,
)
from server.host.tasks import run_to_completion
from server.request.body import ClientGoneError
from server.storage.database import (
    BATCHES,
    Page,
    Reservation,
    Store,
    disk_errors,
    find_row,
    new_id,
    page_of_rows,
)

logger = logging.getLogger(__name__)

INPUT, OUTPUT = "batch", "batch_output"
_PIECE_BYTES = 4 << 20
"""Bytes of an upload that are reserved in one step, if as many are available."""


class FileObject(TypedDict):
    """File object of OpenAI's API; times are Unix seconds."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: NotRequired[int]
    filename: str
    purpose: str
    status: Literal["processed"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Row of the table of files, in the order of its columns."""

    id: str
    owner: str
    purpose: str
    name: str
    bytes: int
    created_at: int
    expires_at: int | None

    def shown(self) -> FileObject:
        shown: FileObject = {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }
        if self.expires_at is not None:
            shown["expires_at"] = self.expires_at
        return shown


FieldCheck = Callable[[dict[str, str]], tuple[str, int | None]]
"""Return the purpose and the seconds to keep (None: the default) for the fields of an upload."""


class FileStore:
    """Files of the data folder. Files of other owners raise `NotFoundError` as well."""

    def __init__(self, store: Store, max_file_bytes: int, keep_s: int) -> None:
        """`keep_s` is the default time until a file expires, 0 for never."""
        self._database = store.database
        self._folder = store.folder
        self._quotas = store.quotas
        self._max_file_bytes = max_file_bytes
        self._keep_s = keep_s

    async def create(self, owner: str, source: Upload, check: FieldCheck) -> StoredFile:
        """Store the content of `source`, whose fields `check` checks.

        Raises the errors of `source` and `check`, `BodyTooLargeError`, `StorageFullError` and
        `StorageUnavailableError`.
        """
        reservation = Reservation(self._quotas, owner, "files")
        file_id = new_id("file-")
        part = self._folder.parts / file_id
        with disk_errors():
            try:
                await self._database.run(self._quotas.reserve, reservation)
                size = await self._write(part, source.chunks(), reservation)
                purpose, keep_s = check(source.fields)
                now = int(time.time())
                kept = self._keep_s if keep_s is None else keep_s
                expires_at = now + kept if kept else None
                name = source.name or ""
                file = StoredFile(file_id, owner, purpose, name, size, now, expires_at)
                # A cancellation between the two steps would leave a row or a content alone.
                await run_to_completion(self._commit(part, file, reservation))
            finally:
                reservation.release()
                # The next start removes a part that cannot be removed now.
                with suppress(OSError):
                    await asyncio.to_thread(part.unlink, missing_ok=True)
        return file

    async def get(self, owner: str, file_id: str) -> StoredFile:
        """Return a file. Raises `NotFoundError`."""
        return await self._database.read(find, owner, file_id)

    async def list_files(
        self, owner: str, page: Page, purpose: str | None = None
    ) -> tuple[list[StoredFile], bool]:
        def read(db: sqlite3.Connection) -> tuple[list[StoredFile], bool]:
            conditions = {} if purpose is None else {"purpose": purpose}
            rows, more = page_of_rows(db, "files", owner, page, **conditions)
            return [StoredFile(*row) for row in rows], more

        return await self._database.read(read)

    def content_path(self, file_id: str) -> Path:
        return self._folder.files / file_id

    async def delete(self, owner: str, file_id: str) -> None:
        """Delete a file. Raises `NotFoundError`."""

        def delete(db: sqlite3.Connection) -> None:
            find(db, owner, file_id)
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))

        await self._database.run(delete)
        await self._remove(file_id)

    async def remove_expired(self, now: int) -> int:
        """Delete the files that have expired at `now`; return their number.

        Input files of open batches do not expire yet.
        """

        def delete(db: sqlite3.Connection) -> list[str]:
            rows = db.execute(
                "DELETE FROM files WHERE expires_at <= ? AND id NOT IN "
                f"(SELECT input_file FROM batches WHERE {BATCHES.is_open}) RETURNING id",
                (now,),
            )
            return [row[0] for row in rows.fetchall()]

        expired = await self._database.run(delete)
        for file_id in expired:
            await self._remove(file_id)
        return len(expired)

    async def remove_unknown(self) -> None:
        """Delete contents without a row, which a crash can leave."""
        rows = await self._database.read(lambda db: db.execute("SELECT id FROM files").fetchall())
        known = {row[0] for row in rows}
        for path in self._folder.files.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    async def _write(
        self, part: Path, chunks: AsyncIterator[bytes], reservation: Reservation
    ) -> int:
        """Reserve and write the bytes of a part; return its size."""
        size = 0
        with part.open("xb") as file:

            def append(chunk: bytes) -> None:
                self._folder.require(len(chunk))
                file.write(chunk)

            async for chunk in chunks:
                size += len(chunk)
                if size > self._max_file_bytes:
                    raise BodyTooLargeError(
                        "The file is larger than the limit of "
                        f"{self._max_file_bytes} bytes (--max-file-bytes)."
                    )
                if size > reservation.size:
                    least = size - reservation.size
                    extend = self._quotas.extend
                    await self._database.run(extend, reservation, least, _PIECE_BYTES)
                await asyncio.to_thread(append, chunk)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        return size

    async def _remove(self, file_id: str) -> None:
        """Remove the content of a deleted row; on failure the next start removes it."""
        try:
            await asyncio.to_thread(self.content_path(file_id).unlink, missing_ok=True)
        except OSError as error:
            logger.warning(
                "The content of %s cannot be removed before the next start: %s", file_id, error
            )

    async def _commit(self, part: Path, file: StoredFile, reservation: Reservation) -> None:
        """Move a part to the files, then insert its row: a row must never lack its content."""

        def store(db: sqlite3.Connection) -> None:
            self._quotas.settle(db, reservation, file.bytes)
            insert(db, file)

        try:
            await asyncio.to_thread(self._folder.keep, part, file.id)
            await self._database.run(store)
        except Exception:
            with suppress(OSError):
                await asyncio.to_thread(self.content_path(file.id).unlink, missing_ok=True)
            raise


def insert(connection: sqlite3.Connection, file: StoredFile) -> None:
    """Insert the row of a file, unless it exists."""
    connection.execute("INSERT OR IGNORE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(file))


def find(
    connection: sqlite3.Connection, owner: str, file_id: str, param: str = "file_id"
) -> StoredFile:
    """Return a file of an owner. Raises `NotFoundError` for the parameter `param`."""
    return StoredFile(*find_row(connection, "files", owner, file_id, param))


_MAX_BOUNDARY_BYTES = 70
"""Limit of RFC 2046, below the one at which python-multipart raises an undocumented error."""
_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 16
_MAX_HEADER_BYTES = 4096
_MAX_NAME_CHARS = 255


class Upload:
    """Multipart form; `name` and `fields` are complete once `chunks` has ended."""

    def __init__(self, request: Request, timeout_s: float) -> None:
        """Read the content type. Raises `MediaTypeError`."""
        content_type = request.headers.get("content-type", "")
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise MediaTypeError(
                f"The content type must be multipart/form-data with a boundary, got "
                f"{describe(content_type)}."
            )
        if len(boundary) > _MAX_BOUNDARY_BYTES:
            raise MediaTypeError(
                f"The boundary of a form has at most {_MAX_BOUNDARY_BYTES} bytes, got "
                f"{len(boundary)}."
            )
        self.fields: dict[str, str] = {}
        self.name: str | None = None
        self._request = request
        self._timeout_s = timeout_s
        self._pieces: list[bytes] = []
        self._ended = False
        self._begin_part()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the file's chunks.

        Raises `InvalidValueError`, `MissingFieldError`, `BodyTimeoutError`, `ClientGoneError`.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                async for data in self._request.stream():
                    self._parser.write(data)
                    for piece in self._pieces:
                        yield piece
                    self._pieces.clear()
        except FormParserError as error:
            raise InvalidValueError(f"The form cannot be read: {error}.", param="file") from None
        except TimeoutError:
            raise BodyTimeoutError(
                f"The file did not arrive within {self._timeout_s:g} s.",
                headers={"connection": "close"},
            ) from None
        except ClientDisconnect:
            raise ClientGoneError from None
        if not self._ended:
            raise InvalidValueError("The form is incomplete.", param="file")
        if self.name is None:
            raise MissingFieldError("The field 'file' is missing.", param="file")

    # Callbacks of the parser.

    def _begin_part(self) -> None:
        self._header, self._value, self._content = b"", b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._field, self._is_file = "", False

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]
        self._check_header()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._header) + len(self._value) > _MAX_HEADER_BYTES:
            raise InvalidValueError(
                f"A header of the form has more than {_MAX_HEADER_BYTES} bytes.", param="file"
            )

    def _end_header(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header, self._value = b"", b""

    def _end_headers(self) -> None:
        options: dict[Any, bytes]
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._field = options.get(b"name", b"").decode(errors="replace")
        file_name = options.get(b"filename")
        if file_name is None:
            return
        if self._field != "file" or self.name is not None:
            raise InvalidValueError(
                f"The form must have one file, in the field 'file'; got another in "
                f"{describe(self._field)}.",
                param=self._field,
            )
        self._is_file = True
        self.name = file_name.decode(errors="replace")[:_MAX_NAME_CHARS]

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(data[start:end])
            return
        self._content += data[start:end]
        if len(self._content) > _MAX_FIELD_BYTES:
            raise InvalidValueError(
                f"{describe(self._field)} has more than {_MAX_FIELD_BYTES} bytes.",
                param=self._field,
            )

    def _end_part(self) -> None:
        if self._is_file:
            return
        if len(self.fields) >= _MAX_FIELDS:
            raise InvalidValueError(f"The form has more than {_MAX_FIELDS} fields.")
        self.fields[self._field] = self._content.decode(errors="replace")

    def _end(self) -> None:
        self._ended = True
