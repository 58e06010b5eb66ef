"""Streams of one server, alternating between some tokens with metrics and some without."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.clients.load import EVENT, http_request
from benchmarks.engines.server_process import ServerProcess, Serving
from benchmarks.engines.sides import server_side
from benchmarks.metrics.report import Pairs
from benchmarks.metrics.unmetered import Switch, plugin_folder
from benchmarks.models.shapes import Checkpoint
from benchmarks.models.text_checkpoint import prompt_text, text_checkpoint
from benchmarks.runner.command import say
from benchmarks.runner.machine import busy_cpu_seconds

_MAX_MODEL_LEN = 1024
_KV_CACHE_BYTES = 1 << 28
_PROMPT_TOKENS, _OUTPUT_TOKENS = 32, 900
# See `metrics.cost`.
_TOKENS_A_TURN = 7


def compare_loads(
    checkpoint: Checkpoint, concurrency: Sequence[int], rounds: int, folder: Path
) -> list[Pairs]:
    """Return milliseconds between the tokens of a stream with and without metrics, by concurrency.

    Raises ServerError if the server does not start or answers an error.
    """
    folder.mkdir()
    switch = plugin_folder(folder / "plugin")
    with _server(text_checkpoint(checkpoint.path), folder) as server, server.awake():
        _sample(server, switch, 1, "warm")
        return [_pairs(server, switch, level, rounds) for level in concurrency]


def _server(text_model: Path, folder: Path) -> ServerProcess:
    ours = server_side("ours")
    # This checkout's command; the installed one may be another checkout's.
    path = [str(Path(__file__).parents[2]), str(folder / "plugin")]
    side = replace(
        ours,
        command=lambda s: [sys.executable, "-m", "server", *ours.command(s)[1:]],
        env={**ours.env, "PYTHONPATH": ":".join(path)},
    )
    serving = Serving.of(text_model, _MAX_MODEL_LEN, _KV_CACHE_BYTES)
    say("starting a server")
    return ServerProcess(side, serving, folder / "server.log")


def _pairs(server: ServerProcess, switch: Switch, level: int, rounds: int) -> Pairs:
    wall, all_busy = time.perf_counter(), busy_cpu_seconds()
    before, own = server.cpu_seconds(), time.process_time()
    pairs = [_sample(server, switch, level, str(turn)) for turn in range(rounds)]
    wall, all_busy = time.perf_counter() - wall, busy_cpu_seconds() - all_busy
    used = server.cpu_seconds().since(before)
    ours = used.http + used.engine + time.process_time() - own
    other = max(0.0, all_busy - ours) / wall
    result = Pairs(f"HTTP, concurrency {level}", "ms a token", pairs, other)
    say(f"  {result.label}: {result.cost:+.2%}")
    return result


def _sample(server: ServerProcess, switch: Switch, level: int, seed: str) -> tuple[float, float]:
    """Return the median milliseconds between two tokens with metrics and without."""
    chooser = random.Random(seed)
    bodies = [
        server.body(prompt_text(chooser, _PROMPT_TOKENS), _OUTPUT_TOKENS) for _ in range(level)
    ]
    turns = _Turns(switch)

    async def run() -> list[int]:
        port = server.serving.port
        streams = (_stream(port, body, turns, leads=not i) for i, body in enumerate(bodies))
        return await asyncio.gather(*streams)

    if min(asyncio.run(run())) < _OUTPUT_TOKENS // 2:
        raise server.error("answered fewer tokens than requested")
    return statistics.median(turns.gaps[0]) * 1e3, statistics.median(turns.gaps[1]) * 1e3


@dataclass
class _Turns:
    """The current turn, and the seconds between tokens with metrics ([0]) and without ([1])."""

    switch: Switch
    number: int = 0
    gaps: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def next(self) -> None:
        self.number += 1
        self.switch.turn(metered=not self.number % 2)


async def _stream(port: int, body: dict[str, Any], turns: _Turns, *, leads: bool) -> int:
    """Read one answer and return its events; the leading stream ends the turns."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(http_request(body, port))
    events, last, turn = 0, 0.0, -1
    while b"[DONE]" not in (data := await reader.read(1 << 16)) and data:
        now = time.perf_counter()
        count = data.count(EVENT)
        # A gap across a change of turns counts for neither.
        if count == 1 and turn == turns.number:
            turns.gaps[turn % 2].append(now - last)
        last, turn, events = now, turns.number, events + count
        if leads and events % _TOKENS_A_TURN == 0:
            turns.next()
    writer.close()
    return events
