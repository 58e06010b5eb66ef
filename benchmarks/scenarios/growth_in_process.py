"""Costs of the server's own parts by size: stored responses, batch files and the metrics page.

Each part is prepared once for a size. A sample calls the code of the server on real files.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.runner.machine import ChildMeter
from benchmarks.scenarios.bench import Sample, Values

_OWNER = "owner"
_CALLS = 40
_LINES_AT_ONCE = 1000
Prepared = Callable[[int], Sample]


def _seconds(call: Callable[[int], object], calls: int = _CALLS) -> float:
    """Return the median seconds of a call; it gets its number."""
    times = []
    for number in range(calls):
        began = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def _sampled(take: Callable[[], Values]) -> Prepared:
    def once(_: int) -> Sample:
        meter = ChildMeter()
        values = take()
        return Sample(values, meter.other_busy_cores())

    return once


def _settings(folder: Path) -> Any:
    from server import bounds
    from server.settings import ServerSettings

    bounds.MAX_RESPONSES_PER_KEY = 1 << 30
    shutil.rmtree(folder, ignore_errors=True)
    return ServerSettings(
        data_dir=folder,
        min_free_bytes=0,
        max_stored_bytes=1 << 40,
    )


@contextmanager
def _responses(folder: Path, size: int) -> Iterator[Prepared]:
    """Store `size` responses, each but the first of ten continuing the one before it."""
    from server.storage.jobs import RESPONSES
    from server.storage.quotas import Reservation
    from server.storage.responses import table
    from server.storage.responses.response import Response
    from server.storage.store import Store

    store = Store(_settings(folder / "responses"))
    text = b"[" + b'{"type":"message","content":"' + b"x" * 400 + b'"}]'
    now = int(time.time())

    def response(number: int) -> Response:
        previous = f"resp_{number - 1}" if number % 10 else None
        return Response(
            *(f"resp_{number}", _OWNER, previous, "completed", now, now + (1 << 20)),
            *(text, b"{}", text, 2 * len(text)),
        )

    def insert(db: sqlite3.Connection, numbers: range) -> None:
        for number in numbers:
            table.insert(db, response(number), Reservation(store.quotas, _OWNER, "responses"))

    store.database.run_now(insert, range(size))
    added = size

    def add(_: int) -> None:
        nonlocal added
        store.database.run_now(insert, range(added, added + 1))
        added += 1

    def refresh(db: sqlite3.Connection, _: int) -> None:
        table.delete_expired(db, now)
        RESPONSES.count_by_status(db)

    def take() -> Values:
        run = store.database.run_now
        return {
            "read a stored response": (
                1e6 * _seconds(lambda i: run(table.get, _OWNER, f"resp_{i * 7919 % size}")),
                "µs",
            ),
            "store a response": (1e6 * _seconds(add), "µs"),
            "refresh of stored responses, every 5 s": (
                1e6 * _seconds(lambda i: run(refresh, i), 10),
                "µs",
            ),
        }

    try:
        yield _sampled(take)
    finally:
        store.close()


@contextmanager
def _lines(folder: Path, size: int) -> Iterator[Prepared]:
    """Write a batch file of `size` lines; a sample validates it into the database."""
    from server.storage.batches import table
    from server.storage.batches.input_lines import LineRules, read_lines
    from server.storage.batches.line_results import LineResult
    from server.storage.store import Store

    store = Store(_settings(folder / "lines"))
    path = folder / "input.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(size):
            body = {"model": "m", "messages": [{"role": "user", "content": f"word {number}"}]}
            line = {"custom_id": f"line-{number}", "method": "POST"}
            file.write(json.dumps({**line, "url": "/v1/chat/completions", "body": body}) + "\n")
    rules = LineRules("/v1/chat/completions", 1 << 30, 1 << 20)

    def validate(_: int) -> None:
        lines = read_lines(path, rules)
        while found := list(islice(lines, _LINES_AT_ONCE)):
            store.database.run_now(table.add_lines, "batch", found)  # type: ignore[arg-type]
        store.database.run_now(table.duplicates, "batch", 1)

    def finish(db: sqlite3.Connection, _: int) -> None:
        lines = table.waiting_lines(db, "batch", [], 32)
        table.count_results(
            db, [LineResult(line=line, succeeded=True, text=b"{}") for line in lines]
        )

    def take() -> Values:
        run = store.database.run_now
        validation = _seconds(validate, 1)
        next_lines = _seconds(lambda i: run(finish, i), 10)
        deletion = _seconds(lambda _: run(table.delete_lines, "batch"), 1)
        return {
            "validate a batch file by lines": (1e3 * validation, "ms"),
            "next lines of a batch and their results": (1e6 * next_lines, "µs"),
            "delete the lines of a batch": (1e3 * deletion, "ms"),
        }

    try:
        yield _sampled(take)
    finally:
        store.close()


@contextmanager
def _metrics(folder: Path, size: int) -> Iterator[Prepared]:
    """Count requests of `size` API keys with every outcome."""
    from server.observability.declarations import OUTCOMES
    from server.observability.metrics import ServerMetrics

    metrics = ServerMetrics(folder / "metrics")
    for key in range(size):
        for outcome in OUTCOMES:
            metrics.observe_key(f"key-{key}", outcome, 10, 10)

    def take() -> Values:
        return {"metrics page by API keys": (1e3 * _seconds(lambda _: metrics.render(), 20), "ms")}

    yield _sampled(take)


METERED: dict[str, Callable[[Path, int], AbstractContextManager[Prepared]]] = {
    "read a stored response": _responses,
    "validate a batch file by lines": _lines,
    "metrics page by API keys": _metrics,
}
"""Parts by a curve with their sizes; a sample gives all curves of the part."""
