"""One file of lines through the service's own API: left, followed, fetched."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from pydantic_core import from_json

from rbln_backend.host.replaced_files import replace_file

_POLL_S = 0.2
_WIDTH = 24
_SHOWN_ERRORS = 20
_CHUNK = 1 << 20
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")


class JobError(Exception):
    """The file cannot be answered; the message is for whoever started it."""


class BatchJob:
    """Leaves a file with a service that has it for itself, and fetches the answers."""

    def __init__(self, url: str, key: str, source: Path, target: Path) -> None:
        """`key` opens the API at `url`."""
        self._client = httpx.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=600, trust_env=False
        )
        self._source, self._target = source, target
        self._line = _Line()

    async def run(self) -> None:
        """Answer the whole file. Raises `JobError`."""
        async with self._client:
            await self._until_ready()
            batch = await self._begin()
            while batch["status"] in _OPEN:
                self._line.show(batch)
                await asyncio.sleep(_POLL_S)
                batch = await self._get(f"/v1/batches/{batch['id']}")
            self._line.show(batch, last=True)
            if batch["errors"]:
                raise JobError(_complaint(batch["errors"]["data"]))
            await self._write(batch)
            if batch["status"] != "completed":
                raise JobError(
                    f"the batch is {batch['status']}; {self._target} says of which lines"
                )

    async def _until_ready(self) -> None:
        while (await self._client.get("/readyz")).status_code != httpx.codes.OK:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    async def _begin(self) -> dict[str, Any]:
        """Return the batch of this file: the one that an earlier run began, or a new one."""
        name = await asyncio.to_thread(_digest, self._source)
        every = (await self._get("/v1/batches"))["data"]
        for batch in every:
            if (batch["metadata"] or {}).get("content") == name and batch["status"] in (
                *_OPEN,
                "completed",
            ):
                return dict(batch)
        endpoint = await asyncio.to_thread(_endpoint, self._source)
        file = await self._upload()
        wish = {
            "input_file_id": file["id"],
            "endpoint": endpoint,
            "completion_window": "24h",
            "metadata": {"content": name},
        }
        return _told(await self._client.post("/v1/batches", json=wish))

    async def _upload(self) -> dict[str, Any]:
        edge = "rbln-serve-batch"
        head = (
            f'--{edge}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{edge}'
            '\r\ncontent-disposition: form-data; name="file"; filename="input.jsonl"\r\n\r\n'
        )

        async def body() -> AsyncIterator[bytes]:
            yield head.encode()
            with self._source.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
            yield f"\r\n--{edge}--\r\n".encode()

        headers = {"content-type": f"multipart/form-data; boundary={edge}"}
        return _told(await self._client.post("/v1/files", content=body(), headers=headers))

    async def _get(self, path: str) -> dict[str, Any]:
        return _told(await self._client.get(path))

    async def _write(self, batch: dict[str, Any]) -> None:
        """Write all answers, in the order of the lines."""
        found: dict[str, bytes] = {}
        for name in (batch["output_file_id"], batch["error_file_id"]):
            if name is None:
                continue
            async with self._client.stream("GET", f"/v1/files/{name}/content") as answer:
                async for line in answer.aiter_lines():
                    found[from_json(line)["custom_id"]] = line.encode()
        await asyncio.to_thread(self._put, found)

    def _put(self, found: dict[str, bytes]) -> None:
        with self._source.open("rb") as lines:
            names = [from_json(line)["custom_id"] for line in lines if line.strip()]
        replace_file(self._target, b"".join(found[name] + b"\n" for name in names))


class _Line:
    """The state of a batch on standard error: a bar on a terminal, elsewhere each tenth part."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._began: tuple[float, int] | None = None
        self._told = -1

    def show(self, batch: dict[str, Any], *, last: bool = False) -> None:
        """Show how far it is."""
        counts = batch["request_counts"]
        done, total = counts["completed"] + counts["failed"], counts["total"]
        if not total:
            return
        if self._began is None:
            self._began = time.monotonic(), done
        filled = _WIDTH * done // total
        bar = "#" * filled + "." * (_WIDTH - filled)
        failed = f", {counts['failed']} failed" if counts["failed"] else ""
        text = f"[{bar}] {done}/{total} lines{failed}{self._eta(done, total)}"
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K" + text + ("\n" if last else ""))
        elif (tenth := 10 * done // total) != self._told:
            self._told = tenth
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def _eta(self, done: int, total: int) -> str:
        assert self._began is not None
        began, before = self._began
        seconds = time.monotonic() - began
        if done in (before, total):
            return f", {seconds:.0f} s"
        left = seconds / (done - before) * (total - done)
        return f", {seconds:.0f} s, ETA {left:.0f} s"


def _told(answer: httpx.Response) -> dict[str, Any]:
    found = dict(answer.json())
    if answer.status_code >= httpx.codes.BAD_REQUEST:
        raise JobError(found["error"]["message"])
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _endpoint(path: Path) -> str:
    """Return what the first line asks; that the others ask the same is checked with them."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        url = json.loads(first)["url"]
    except (ValueError, TypeError, KeyError):
        raise JobError(f"the first line of {path} is no request with a 'url'") from None
    return str(url)


def _complaint(errors: list[dict[str, Any]]) -> str:
    lines = [f"  line {error['line'] or '-'}: {error['message']}" for error in errors]
    more = len(lines) - _SHOWN_ERRORS
    return "\n".join(
        [
            "the input is wrong",
            *lines[:_SHOWN_ERRORS],
            *([f"  and {more} more"] if more > 0 else []),
        ]
    )
