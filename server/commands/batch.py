"""`rbln-serve batch`: answers the requests of a JSONL file without a public service.

It runs the service of `serve` on a loopback port with a random key, so that the same checks apply.
The store lies next to the output until that is complete, so that a later run resumes a stopped one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from server.commands.batch_job import BatchJob, JobError, require_sound
from server.settings import ServerSettings

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


def paths_of(argv: Sequence[str]) -> tuple[Path, Path]:
    """Return the input and output paths. Raises `ValueError` if one cannot be used."""
    source, target = (Path(text) for text in argv)
    if not source.is_file():
        raise ValueError(f"the input {source} is no file")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"the folder of the output {target} does not exist")
    return source, target
