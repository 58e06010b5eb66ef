"""Files of clients: contents stored by id, with an owner, a quota and an expiry.

An upload is one file in a multipart form with a few fields. Memory holds one chunk and the fields.
Chunks are yielded as they arrive, so fields after the file are known only once it has ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NotRequired, Protocol

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
from server.storage.database import Page, disk_errors, find_row, new_id, page_of_rows
from server.storage.store import Reservation, Store, usage_of

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
    """Row of the table of files, in the order of its columns; see `server.storage.owners`."""

    id: str
    owner: str
    purpose: str
    name: str
    bytes: int
    created_at: int
    expires_at: int | None

    def shown(self) -> FileObject:
        """Return the file object of the API."""
        shown = FileObject(
            id=self.id,
            object="file",
            bytes=self.bytes,
            created_at=self.created_at,
            filename=self.name,
            purpose=self.purpose,
            status="processed",
        )
        if self.expires_at is not None:
            shown["expires_at"] = self.expires_at
        return shown


FieldCheck = Callable[[dict[str, str]], tuple[str, int | None]]
"""Return the purpose and the seconds to keep (None: the default) for the fields of an upload."""


class UploadSource(Protocol):
    """Source of an upload; its name and fields are complete after the last chunk."""

    name: str | None
    fields: dict[str, str]

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the content."""
        ...


class FileStore:
    """Files of the data folder. Files of other owners raise `NotFoundError` as well."""

    def __init__(
        self,
        store: Store,
        max_file_bytes: int,
        keep_s: int,
        files_in_use: Callable[[sqlite3.Connection], Sequence[str]],
    ) -> None:
        """Create the store of files.

        `keep_s` is the default time until a file expires, 0 for never. `files_in_use` returns the
        ids of files that must not expire yet.
        """
        self._database = store.database
        self._folder = store.folder
        self._quotas = store.quotas
        self._max_file_bytes = max_file_bytes
        self._keep_s = keep_s
        self._files_in_use = files_in_use

    async def create(self, owner: str, source: UploadSource, check: FieldCheck) -> StoredFile:
        """Store the content of `source`, whose fields `check` checks.

        Raises the errors of `source` and `check`, `BodyTooLargeError`, `StorageFullError` and
        `StorageUnavailableError`.
        """
        with disk_errors():
            return await self._create(owner, source, check)

    async def _create(self, owner: str, source: UploadSource, check: FieldCheck) -> StoredFile:
        reservation = Reservation(self._quotas, owner, "files")
        file_id = new_id("file-")
        part = self._folder.parts / file_id
        try:
            await self._database.run(self._quotas.reserve, reservation)
            size = await self._write(part, source.chunks(), reservation)
            purpose, keep_s = check(source.fields)
            now = int(time.time())
            kept = self._keep_s if keep_s is None else keep_s
            file = StoredFile(
                *(file_id, owner, purpose, source.name or "", size),
                *(now, now + kept if kept else None),
            )
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
        """Return a page of the owner's files, and whether more follow."""
        return await self._database.read(_page, owner, page, purpose)

    def content_path(self, file_id: str) -> Path:
        """Return the path of the content of a file."""
        return self._folder.files / file_id

    async def delete(self, owner: str, file_id: str) -> None:
        """Delete a file. Raises `NotFoundError`."""
        await self._database.run(_delete, owner, file_id)
        await self._remove(file_id)

    async def remove_expired(self, now: int) -> int:
        """Delete the files that have expired at `now`; return their number."""
        expired = await self._database.run(self._delete_expired, now)
        for file_id in expired:
            await self._remove(file_id)
        return len(expired)

    async def remove_unknown(self) -> None:
        """Delete contents without a row, which a crash can leave."""
        known = set(await self._database.read(_ids))
        for path in self._folder.files.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    async def usage(self) -> tuple[int, int]:
        """Return the number of files and the sum of their bytes."""
        return await self._database.read(usage_of, "files")

    async def _write(
        self, part: Path, chunks: AsyncIterator[bytes], reservation: Reservation
    ) -> int:
        """Reserve and write the bytes of a part; return its size."""
        size = 0
        with part.open("xb") as file:
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
                await asyncio.to_thread(self._append, file, chunk)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        return size

    async def _remove(self, file_id: str) -> None:
        """Remove the content of a deleted row; on failure the next start removes it."""
        try:
            await asyncio.to_thread(self._unlink, file_id)
        except OSError as error:
            logger.warning(
                "The content of %s cannot be removed before the next start: %s", file_id, error
            )

    def _unlink(self, file_id: str) -> None:
        (self._folder.files / file_id).unlink(missing_ok=True)

    def _append(self, file: BinaryIO, chunk: bytes) -> None:
        self._folder.require(len(chunk))
        file.write(chunk)

    async def _commit(self, part: Path, file: StoredFile, reservation: Reservation) -> None:
        """Move a part to the files, then insert its row: a row must never lack its content."""
        try:
            await asyncio.to_thread(self._folder.keep, part, file.id)
            await self._database.run(self._insert, file, reservation)
        except Exception:
            with suppress(OSError):
                await asyncio.to_thread(self._unlink, file.id)
            raise

    def _insert(
        self, connection: sqlite3.Connection, file: StoredFile, reservation: Reservation
    ) -> None:
        self._quotas.settle(connection, reservation, file.bytes)
        insert(connection, file)

    def _delete_expired(self, connection: sqlite3.Connection, now: int) -> list[str]:
        rows = connection.execute(
            "DELETE FROM files WHERE expires_at <= ? AND id NOT IN "
            "(SELECT value FROM json_each(?)) RETURNING id",
            (now, json.dumps(self._files_in_use(connection))),
        )
        return [row[0] for row in rows.fetchall()]


def insert(connection: sqlite3.Connection, file: StoredFile) -> None:
    """Insert the row of a file, unless it exists."""
    connection.execute("INSERT OR IGNORE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(file))


def find(
    connection: sqlite3.Connection, owner: str, file_id: str, param: str = "file_id"
) -> StoredFile:
    """Return a file of an owner. Raises `NotFoundError` for the parameter `param`."""
    return StoredFile(*find_row(connection, "files", owner, file_id, param))


def _page(
    connection: sqlite3.Connection, owner: str, page: Page, purpose: str | None
) -> tuple[list[StoredFile], bool]:
    conditions = [] if purpose is None else [("purpose", purpose)]
    rows, more = page_of_rows(connection, "files", owner, page, conditions)
    return [StoredFile(*row) for row in rows], more


def _delete(connection: sqlite3.Connection, owner: str, file_id: str) -> None:
    find(connection, owner, file_id)
    connection.execute("DELETE FROM files WHERE id = ?", (file_id,))


def _ids(connection: sqlite3.Connection) -> list[str]:
    return [row[0] for row in connection.execute("SELECT id FROM files")]


_MAX_BOUNDARY_BYTES = 70
"""Limit of RFC 2046, below the one at which python-multipart raises an undocumented error."""
_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 16
_MAX_HEADER_BYTES = 4096
_MAX_NAME_CHARS = 255


class Upload:
    """Multipart form; `fields` are complete once `chunks` has ended."""

    def __init__(self, request: Request, timeout_s: float) -> None:
        """Read the content type. Raises `MediaTypeError`."""
        given = request.headers.get("content-type", "")
        kind, options = parse_options_header(given)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise MediaTypeError(
                f"The content type must be multipart/form-data with a boundary, got "
                f"{describe(given)}."
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
        self._part = _Part()
        self._pieces: list[bytes] = []
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_part_end": self._part_end,
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
                    self._feed(data)
                    for piece in self._pieces:
                        yield piece
                    self._pieces.clear()
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

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidValueError(f"The form cannot be read: {error}.", param="file") from None

    def _begin_part(self) -> None:
        self._part = _Part()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._part.header += data[start:end]
        self._part.check()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.value += data[start:end]
        self._part.check()

    def _header_end(self) -> None:
        self._part.end_header()

    def _headers_end(self) -> None:
        self._part.name, file_name = self._part.names()
        if file_name is None:
            return
        if self._part.name != "file" or self.name is not None:
            raise InvalidValueError(
                f"The form must have one file, in the field 'file'; got another in "
                f"{describe(self._part.name)}.",
                param=self._part.name,
            )
        self._part.is_file = True
        self.name = file_name[:_MAX_NAME_CHARS]

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part.is_file:
            self._pieces.append(data[start:end])
            return
        self._part.content += data[start:end]
        if len(self._part.content) > _MAX_FIELD_BYTES:
            raise InvalidValueError(
                f"{describe(self._part.name)} has more than {_MAX_FIELD_BYTES} bytes.",
                param=self._part.name,
            )

    def _part_end(self) -> None:
        if self._part.is_file:
            return
        if len(self.fields) >= _MAX_FIELDS:
            raise InvalidValueError(f"The form has more than {_MAX_FIELDS} fields.")
        self.fields[self._part.name] = self._part.content.decode(errors="replace")

    def _end(self) -> None:
        self._ended = True


class _Part:
    """Header and content of the part that is being read."""

    def __init__(self) -> None:
        self.header, self.value = b"", b""
        self.content = b""
        self.is_file = False
        self.name = ""
        self._headers: dict[bytes, bytes] = {}

    def check(self) -> None:
        """Raise `InvalidValueError` if a header is too large."""
        if len(self.header) + len(self.value) > _MAX_HEADER_BYTES:
            raise InvalidValueError(
                f"A header of the form has more than {_MAX_HEADER_BYTES} bytes.", param="file"
            )

    def end_header(self) -> None:
        """Store a complete header."""
        self._headers[self.header.lower()] = self.value
        self.header, self.value = b"", b""

    def names(self) -> tuple[str, str | None]:
        """Return the name of the field, and the file name if it is a file."""
        options: dict[Any, bytes]
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        file_name = options.get(b"filename")
        name = options.get(b"name", b"").decode(errors="replace")
        return name, None if file_name is None else file_name.decode(errors="replace")
