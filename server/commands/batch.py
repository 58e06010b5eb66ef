"""`rbln-serve batch`: answers the requests of a JSONL file without a public service.

It runs the service of `serve` on a loopback port with a random key, so that the same checks apply.
The store lies next to the output until that is complete, so that a later run resumes a stopped one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import shutil
import signal
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr
from pydantic_core import from_json

from rbln_backend.host.files import replace_file
from rbln_backend.host.processes import ProgressLine
from server.errors import describe
from server.settings import ServerSettings
from server.storage.batch_table import (
    ENDPOINTS,
    InputLine,
    LineError,
    LineRules,
    duplicate_id,
    read_lines,
)
from server.storage.database import BATCHES

_ANY = 1 << 50
_STOPPED = 130

Work = Callable[[str], Coroutine[Any, Any, int]]
"""A client's work with the service at a URL; returns an exit code."""
Serve = Callable[[ServerSettings, Work], int]
"""Runs the service with these settings, and the work concurrently."""


def answer_file(source: Path, target: Path, settings: ServerSettings, serve: Serve) -> int:
    """Write the answers to the lines of `source` to `target`; return the exit code."""
    try:
        require_sound(source, settings.max_body_bytes)
    except JobError as error:
        return _report(error)
    store = target.with_name(f"{target.name}.partial")
    key = secrets.token_urlsafe(24)
    private = settings.model_copy(
        update={
            "host": "127.0.0.1",
            "port": 0,
            "uds": None,
            "data_dir": store,
            "console": False,
            "api_key": (SecretStr(f"batch={key}"),),
            "api_key_file": None,
            "ssl_certfile": None,
            **dict.fromkeys(("max_batch_lines", "max_file_bytes", "max_stored_bytes"), _ANY),
            "root_path": "",
            "file_retention_s": 0,
        }
    )

    async def work(url: str) -> int:
        try:
            await BatchJob(url, key, source, target).run()
        except JobError as error:
            return _report(error)
        finally:
            signal.raise_signal(signal.SIGTERM)
        return 0

    code = serve(private, work)
    if code == 0:
        shutil.rmtree(store, ignore_errors=True)
    elif store.exists():
        sys.stderr.write(f"Partial results are in {store}; run the same command to resume.\n")
    return code


def _report(error: JobError) -> int:
    sys.stderr.write(f"rbln-serve batch: {error}\n")
    return 1


async def beside(service: Coroutine[Any, Any, int], work: Coroutine[Any, Any, int]) -> int:
    """Run `work` concurrently with the service; return the first exit code that is not 0."""
    job = asyncio.ensure_future(work)
    try:
        code = await service
        if not job.done():
            # The service ended first: by a signal, or because the engine could not start.
            return code or _STOPPED
        return code or job.result()
    finally:
        job.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({job})


def get_job_paths(argv: Sequence[str]) -> tuple[Path, Path]:
    """Return the input and output paths. Raises `ValueError` if one cannot be used."""
    source, target = (Path(text) for text in argv)
    if not source.is_file():
        raise ValueError(f"the input {source} is no file")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"the folder of the output {target} does not exist")
    return source, target


_POLL_S = 0.2
_SHOWN_ERRORS = 20


class JobError(Exception):
    """The file cannot be answered; the message is printed to the user."""


class BatchJob:
    """Uploads a file to the private service, waits for its batch and downloads the answers."""

    def __init__(self, url: str, key: str, source: Path, target: Path) -> None:
        """Use the API at `url` with `key`."""
        self._client = httpx.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=600, trust_env=False
        )
        self._source, self._target = source, target

    async def run(self) -> None:
        """Answer the whole file. Raises `JobError`."""
        async with self._client:
            await self._until_ready()
            batch = await self._begin()
            line = ProgressLine("batch")
            while batch["status"] in BATCHES.open_statuses:
                _show_progress(batch, line)
                await asyncio.sleep(_POLL_S)
                batch = await self._get(f"/v1/batches/{batch['id']}")
            _show_progress(batch, line)
            line.end()
            if batch["errors"]:
                raise JobError(_error_text(batch["errors"]["data"]))
            await self._write(batch)
            if batch["status"] != "completed":
                raise JobError(
                    f"the batch is {batch['status']}; {self._target} has the result of each line"
                )

    async def _until_ready(self) -> None:
        while (await self._client.get("/readyz")).status_code != httpx.codes.OK:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    async def _begin(self) -> dict[str, Any]:
        """Return the batch of this file: that of an earlier run, or a new one."""
        name = await asyncio.to_thread(_digest, self._source)
        batches = (await self._get("/v1/batches"))["data"]
        for batch in batches:
            if (batch["metadata"] or {}).get("content") == name and batch["status"] in (
                *BATCHES.open_statuses,
                "completed",
            ):
                return dict(batch)
        endpoint = await asyncio.to_thread(_endpoint, self._source)
        with self._source.open("rb") as lines:
            files = {"file": ("input.jsonl", lines)}
            answer = await self._client.post("/v1/files", data={"purpose": "batch"}, files=files)
        body = {
            "input_file_id": _json(answer)["id"],
            "endpoint": endpoint,
            "completion_window": "24h",
            "metadata": {"content": name},
        }
        return _json(await self._client.post("/v1/batches", json=body))

    async def _get(self, path: str) -> dict[str, Any]:
        return _json(await self._client.get(path))

    async def _write(self, batch: dict[str, Any]) -> None:
        """Write all answers in the order of the input lines."""
        answers: dict[str, bytes] = {}
        for name in (batch["output_file_id"], batch["error_file_id"]):
            if name is None:
                continue
            async with self._client.stream("GET", f"/v1/files/{name}/content") as answer:
                async for line in answer.aiter_lines():
                    answers[from_json(line)["custom_id"]] = line.encode()
        await asyncio.to_thread(self._put, answers)

    def _put(self, answers: dict[str, bytes]) -> None:
        with self._source.open("rb") as lines:
            texts = (line.removeprefix(BOM_UTF8) for line in lines if line.strip())
            names = [from_json(text)["custom_id"] for text in texts]
        replace_file(self._target, b"".join(answers[name] + b"\n" for name in names))


def require_sound(source: Path, max_bytes: int) -> None:
    """Raise `JobError` for invalid lines before the engine starts.

    `max_bytes` is the limit of one line.
    """
    endpoint = _endpoint(source)
    known = [endpoint.value for endpoint in ENDPOINTS]
    if endpoint not in known:
        raise JobError(
            f"url of the first line: must be one of {', '.join(known)}, got {describe(endpoint)}"
        )
    errors: list[LineError] = []
    seen: set[str] = set()
    for line in read_lines(source, LineRules(endpoint, sys.maxsize, max_bytes)):
        if not isinstance(line, InputLine):
            errors.append(line)
        elif line.custom_id in seen:
            errors.append(duplicate_id(line.number, line.custom_id))
        else:
            seen.add(line.custom_id)
    if errors:
        raise JobError(_error_text(errors))


def _show_progress(batch: dict[str, Any], line: ProgressLine) -> None:
    counts = batch["request_counts"]
    if counts["total"]:
        failed = f", {counts['failed']} failed" if counts["failed"] else ""
        line.show("lines", counts["completed"] + counts["failed"], counts["total"], failed)


def _json(answer: httpx.Response) -> dict[str, Any]:
    body = dict(answer.json())
    if answer.status_code >= httpx.codes.BAD_REQUEST:
        raise JobError(body["error"]["message"])
    return body


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _endpoint(path: Path) -> str:
    """Return the `url` of the first line; the other lines are checked against it later."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        url = json.loads(first)["url"]
    except (ValueError, TypeError, KeyError):
        raise JobError(f"the first line of {path} has no 'url'") from None
    return str(url)


def _error_text(errors: Sequence[LineError]) -> str:
    lines = [f"  line {error['line'] or '-'}: {error['message']}" for error in errors]
    if (more := len(lines) - _SHOWN_ERRORS) > 0:
        lines[_SHOWN_ERRORS:] = [f"  and {more} more"]
    return "\n".join(["the input is invalid", *lines])
