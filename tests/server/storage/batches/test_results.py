"""Result files of batches: the event loop waits for none of their disk calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from server.storage.batches import ResultFiles
from tests.server.scripted import running
from tests.server.storage.batches.clients import create, line, until_ended


@contextmanager
def system_calls_of_this_thread(calls: list[str]) -> Iterator[None]:
    """Note the calls of the module `posix` that the result files make in this thread."""

    def note(frame: FrameType | None, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__module__", None) == "posix":
            while frame is not None:
                if isinstance(frame.f_locals.get("self"), ResultFiles):
                    calls.append(called.__name__)
                frame = frame.f_back

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


async def test_the_event_loop_makes_no_disk_calls(tmp_path: Path) -> None:
    parts = tmp_path / "data" / "parts"
    parts.mkdir(parents=True)
    (parts / "unknown.output").write_bytes(b"x")
    calls: list[str] = []
    with system_calls_of_this_thread(calls):
        async with running(tmp_path, data_dir=tmp_path / "data") as service:
            batch = await until_ended(service.client, await create(service.client, [line(1)]))
    assert batch["request_counts"]["completed"] == 1
    assert not [*parts.iterdir()]
    # Names of paths are no disk calls.
    assert not [name for name in calls if name != "fspath"]
