"""Two servers of one model, one of which records no metrics of ours, under the same loads."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.command import say
from benchmarks.load import Load
from benchmarks.machine import busy_cpu_seconds
from benchmarks.metrics_report import Pairs
from benchmarks.models import Checkpoint
from benchmarks.server_process import ServerProcess, Serving, free_port
from benchmarks.sides import server_sides
from benchmarks.text_checkpoint import prompt_text, text_checkpoint
from benchmarks.unmetered import plugin_folder

_MAX_MODEL_LEN = 1024
_KV_CACHE_BYTES = 1 << 28
_PROMPT_TOKENS, _OUTPUT_TOKENS, _REQUESTS = 32, 128, 4
_BUDGET_S = 120.0


def compare_servers(
    checkpoint: Checkpoint, concurrency: Sequence[int], rounds: int, folder: Path
) -> list[Pairs]:
    """Return seconds of loads, by concurrency, of the server with metrics and of the one without.

    Raises ServerError if one does not start or answers an error.
    """
    folder.mkdir()
    text_model = text_checkpoint(checkpoint.path)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(_server(text_model, folder, metered=metered))
            for metered in (True, False)
        ]
        for server in servers:
            _load(server, 1, "warm")
        return [_pairs(servers, level, rounds) for level in concurrency]


def _server(text_model: Path, folder: Path, *, metered: bool) -> ServerProcess:
    ours = server_sides()["ours"]
    root = Path(__file__).parents[1]
    # The checkout's own command: the installed one may be another's.
    path = [] if metered else [str(plugin_folder(folder / "plugin"))]
    side = replace(
        ours,
        command=lambda s: [sys.executable, "-m", "server", *ours.command(s)[1:]],
        env={**ours.env, "PYTHONPATH": ":".join([str(root), *path])},
    )
    serving = Serving(
        text_model=text_model,
        gguf=text_model,
        port=free_port(),
        max_model_len=_MAX_MODEL_LEN,
        kv_cache_bytes=_KV_CACHE_BYTES,
    )
    name = "with" if metered else "without"
    say(f"starting a server {name} metrics")
    return ServerProcess(side, serving, folder / f"{name}.log")


def _pairs(servers: Sequence[ServerProcess], level: int, rounds: int) -> Pairs:
    wall, everybody = time.perf_counter(), busy_cpu_seconds()
    used, pairs = 0.0, []
    for turn in range(rounds):
        found = [0.0, 0.0]
        for place in (0, 1) if turn % 2 else (1, 0):
            found[place], cpu_s = _load(servers[place], level, str(turn))
            used += cpu_s
        pairs.append((found[0], found[1]))
    wall, everybody = time.perf_counter() - wall, busy_cpu_seconds() - everybody
    result = Pairs(
        f"HTTP, concurrency {level}", "ms a token", pairs, max(0.0, everybody - used) / wall
    )
    say(f"  {result.label}: {result.cost:+.2%}")
    return result


def _load(server: ServerProcess, level: int, seed: str) -> tuple[float, float]:
    """Return milliseconds a token of one load, and the CPU seconds of the server and client."""
    chooser = random.Random(seed)
    texts = [prompt_text(chooser, _PROMPT_TOKENS) for _ in range(_REQUESTS * level)]
    load = Load(
        port=server.serving.port,
        bodies=[server.body(text, _OUTPUT_TOKENS) for text in texts],
        concurrency=level,
        budget_seconds=_BUDGET_S,
    )
    with server.awake():
        time.sleep(0.2)
        before, clients = server.cpu_seconds(), _ended_children_s()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.load"],
            input=json.dumps(asdict(load)),
            capture_output=True,
            text=True,
            check=True,
            timeout=2 * _BUDGET_S,
        )
        used = server.cpu_seconds().since(before)
    answer = json.loads(done.stdout)
    if wrong := [r["error"] for r in answer["requests"] if r["error"]]:
        raise server.error(f"answered {len(wrong)} requests with errors, such as {wrong[0]!r}")
    tokens = sum(request["tokens"] for request in answer["requests"])
    cpu_s = used.http + used.engine + _ended_children_s() - clients
    return answer["seconds"] / tokens * level * 1e3, cpu_s


def _ended_children_s() -> float:
    """Return the CPU seconds of this process's children that have ended: the clients."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
