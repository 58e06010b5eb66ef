"""One load on one server: its prompts, the client process, CPU time and memory."""

from __future__ import annotations

import random
import resource
import subprocess
import time
from dataclasses import asdict, replace
from typing import Any

from benchmarks.clients.load import CUT, ClientProcess, Load
from benchmarks.compare.plans import OUTPUT_TOKENS, PROMPT_TOKENS
from benchmarks.compare.steps import Subject
from benchmarks.engines.engine_process import CpuSeconds
from benchmarks.engines.server_process import ServerProcess
from benchmarks.models.text_checkpoint import prompt_text
from benchmarks.runner.machine import busy_cpu_seconds
from benchmarks.runner.records import HttpRecord

# An aborted load leaves work, and a stopped engine needs time to resume.
_SETTLED_CORES = 0.2
_SETTLE_S, _SETTLE_LIMIT_S = 0.2, 4.0
_PREPARATION_TOKENS = 4
_CLIENT_GRACE_S = 60.0


def sample(
    server: ServerProcess,
    subject: Subject,
    round_number: int,
    concurrency: int,
    requests: int,
    budget_s: float,
    attempt: int = 0,
) -> HttpRecord:
    """Send `requests` prompts of one length, or with `concurrency` 0 all mixed ones, to `server`.

    Every side gets the same prompts; no two rounds or attempts do. Raises ServerError if it
    answers an error.
    """
    mixed = not concurrency
    lengths = list(subject.plan.mixed_tokens) if mixed else [PROMPT_TOKENS] * requests
    output_tokens = 1 if mixed else OUTPUT_TOKENS
    chooser = random.Random(f"{round_number} {attempt} {concurrency}")
    first = server.body(prompt_text(chooser, _PREPARATION_TOKENS), _PREPARATION_TOKENS)
    load = Load(
        port=server.serving.port,
        bodies=[server.body(prompt_text(chooser, length), output_tokens) for length in lengths],
        concurrency=concurrency or len(lengths),
        budget_seconds=budget_s,
    )
    with server.awake():
        settle(server)
        # Caches and pages of a server that slept are cold, unlike those of a busy one.
        send_load(server, replace(load, bodies=[first], concurrency=1))
        meter = Meter(server)
        answer = send_load(server, load)
        used, other_busy_cores = meter.read()
        settle(server)
        pss = server.memory().pss
    return HttpRecord(
        model=subject.name,
        round=round_number,
        side=server.side.name,
        concurrency=concurrency,
        prompts=lengths,
        output_tokens=output_tokens,
        seconds=answer["seconds"],
        gaps=answer["gaps"],
        requests=answer["requests"],
        http_cpu_seconds=used.http,
        engine_cpu_seconds=used.engine,
        pss=pss,
        other_busy_cores=other_busy_cores,
    )


class Meter:
    """CPU time since construction."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._began, self._own = time.perf_counter(), server.cpu_seconds()
        self._all, self._clients = busy_cpu_seconds(), _client_cpu_seconds()

    def read(self) -> tuple[CpuSeconds, float]:
        """Return the server's CPU time, and the cores of others without finished clients."""
        wall = time.perf_counter() - self._began
        used = self._server.cpu_seconds().since(self._own)
        clients = _client_cpu_seconds() - self._clients
        others = busy_cpu_seconds() - self._all - used.http - used.engine - clients
        return used, max(0.0, others) / wall


def send_load(server: ServerProcess, load: Load) -> dict[str, Any]:
    """Run the client process and return an `Outcome` as a dictionary."""
    client = ClientProcess("benchmarks.clients.load", asdict(load))
    try:
        answer = client.end(load.budget_seconds + _CLIENT_GRACE_S)
    except subprocess.SubprocessError as error:
        raise server.error(f"broke the client: {error}") from error
    errors = [r["error"] for r in answer["requests"] if r["error"] not in (None, CUT)]
    if errors:
        raise server.error(f"answered {len(errors)} requests with errors, such as {errors[0]!r}")
    return answer


def settle(server: ServerProcess) -> None:
    """Wait until the server is nearly idle, for a limited time because some threads spin."""
    deadline = time.monotonic() + _SETTLE_LIMIT_S
    while time.monotonic() < deadline:
        before = server.cpu_seconds()
        time.sleep(_SETTLE_S)
        used = server.cpu_seconds().since(before)
        if (used.http + used.engine) / _SETTLE_S < _SETTLED_CORES:
            return


def _client_cpu_seconds() -> float:
    """Return the CPU time of this process's finished children, the clients."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
