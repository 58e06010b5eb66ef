"""`rbln-serve batch`: the lines of a file answered by an engine of its own, without a service.

The engine and the store are those of `serve`, on a loopback port with a key of its own, so that
lines meet the same checks and a run that was ended, however it was, goes on where it stopped: the
store lies beside the output until that is complete.
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
"""What is done with a service at an address."""
Serve = Callable[[ServerSettings, Work], int]
"""Runs the service with these settings, and beside it the work."""


def answer_file(source: Path, target: Path, settings: ServerSettings, serve: Serve) -> int:
    """Answer the lines of `source` into `target`; returns the exit code."""
    try:
        require_sound(source, settings.max_body_bytes)
    except JobError as error:
        return _told(error)
    store = target.with_name(f"{target.name}.partial")
    key = secrets.token_urlsafe(24)
    private = settings.model_copy(
        update={
            "host": "127.0.0.1",
            "port": 0,
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
            return _told(error)
        finally:
            signal.raise_signal(signal.SIGTERM)
        return 0

    code = serve(private, work)
    if code == 0:
        shutil.rmtree(store, ignore_errors=True)
    elif store.exists():
        sys.stderr.write(f"What is done lies in {store}; the same command goes on from there.\n")
    return code


def _told(error: JobError) -> int:
    sys.stderr.write(f"rbln-serve batch: {error}\n")
    return 1


async def beside(service: Coroutine[Any, Any, int], work: Coroutine[Any, Any, int]) -> int:
    """Run `work` beside the service; return the service's exit code, else that of the work."""
    job = asyncio.ensure_future(work)
    try:
        code = await service
        if not job.done():
            # The service was ended first: by a signal, or because the engine could not start.
            return code or _STOPPED
        return code or job.result()
    finally:
        job.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({job})


def paths_of(argv: Sequence[str]) -> tuple[Path, Path]:
    """Return input and output as they were given. Raises `ValueError` where one is wrong."""
    source, target = (Path(text) for text in argv)
    if not source.is_file():
        raise ValueError(f"the input {source} is no file")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"the output {target} would be in a folder that is not there")
    return source, target
