"""Part of a comparison over HTTP: starts, loads and memory of servers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from benchmarks.clients.http_sample import sample
from benchmarks.compare.plans import (
    CONCURRENCY,
    KV_CACHE_BYTES,
    MAX_MODEL_LEN,
    SERIAL_CONCURRENCY,
)
from benchmarks.compare.steps import Subject, measure_round_limits
from benchmarks.engines.server_process import ServerError, ServerProcess, ServerSide, Serving
from benchmarks.runner.command import repeat_disturbed, rotated, say
from benchmarks.runner.records import Failure, HttpRecord, Log, StartRecord

PART, COLD = "http", "cold"
_MIXED_BUDGET_FACTOR = 1.5


class HttpComparison:
    """Servers of one model, logs in `folder`.

    With `own_caches` every side has its own cache root there, empty at the first start, which must
    be a cold one; else all use the user's.
    """

    def __init__(
        self,
        log: Log,
        subject: Subject,
        sides: Sequence[ServerSide],
        folder: Path,
        *,
        own_caches: bool,
    ) -> None:
        self._log = log
        self._subject = subject
        self._sides = list(sides)
        self._folder = folder
        self._own_caches = own_caches

    def cold_starts(self) -> None:
        """Start every side once with an empty cache root, which the later starts find filled."""
        for side in self._sides:
            with ExitStack() as stack:
                self._start(side, stack, cold=True)

    def warm_starts(self, count: int) -> None:
        """Start and end every side `count` times, in turn."""
        for _ in range(count):
            for side in self._sides:
                with ExitStack() as stack:
                    self._start(side, stack, cold=False)

    def load(self) -> None:
        """Start every side, then load them in turn, round by round."""
        plan = self._subject.plan
        with ExitStack() as stack:
            servers = [self._start(side, stack, cold=False) for side in self._sides]
            living = [server for server in servers if server is not None]
            for round_number in range(1, plan.rounds + 1):
                measure_round_limits(self._log, self._subject, round_number, PART)
                for concurrency in (*CONCURRENCY, 0):
                    for server in rotated(living, round_number):
                        if not self._try_cell(server, round_number, concurrency):
                            living.remove(server)

    def _start(self, side: ServerSide, stack: ExitStack, *, cold: bool) -> ServerProcess | None:
        """Start a side and record it; None if it failed."""
        name = self._subject.name
        serving = replace(
            Serving.of(self._subject.text_model, MAX_MODEL_LEN, KV_CACHE_BYTES),
            gguf=self._subject.gguf,
            chunk_tokens=self._subject.plan.chunk_tokens,
        )
        root = self._folder / f"{name}-{side.name}" if self._own_caches else None
        server = ServerProcess(side, serving, self._folder / f"{name}-http-{side.name}.log", root)
        try:
            stack.enter_context(server)
        except (ServerError, OSError) as error:
            say(f"  {side.name} failed: {str(error).splitlines()[0]}")
            self._log.add(Failure(model=name, part=PART, side=side.name, text=str(error)))
            return None
        say(f"  {side.name} answers after {server.answered_s:.1f} s")
        memory, cpu = server.memory(), server.cpu_seconds()
        self._log.add(
            StartRecord(
                model=name,
                side=side.name,
                cold=cold,
                listening_s=server.listening_s,
                ready_s=server.ready_s,
                answered_s=server.answered_s,
                cpu_seconds=cpu.http + cpu.engine,
                **asdict(memory),
            )
        )
        return server

    def _try_cell(self, server: ServerProcess, round_number: int, concurrency: int) -> bool:
        """Measure one cell, of mixed prompts where `concurrency` is 0; False if the server died."""
        plan, side = self._subject.plan, server.side
        if concurrency not in self._concurrency(side):
            return True
        budget = plan.serial_budget_s if side.serial else plan.http_budget_s
        requests = max(concurrency, plan.min_requests)
        if not concurrency:
            budget, requests = budget * _MIXED_BUDGET_FACTOR, 0
        try:
            take = partial(
                sample, server, self._subject, round_number, concurrency, requests, budget
            )
            records = repeat_disturbed(take)
        except (ServerError, OSError) as error:
            say(f"  {side.name} failed: {str(error).splitlines()[0]}")
            self._log.add(
                Failure(model=self._subject.name, part=PART, side=side.name, text=str(error))
            )
            return False
        for record in records:
            self._log.add(record)
        _log_record(records[-1])
        return True

    def _concurrency(self, side: ServerSide) -> tuple[int, ...]:
        if side.serial:
            return (*SERIAL_CONCURRENCY, 0)
        is_ours = side.name == self._sides[0].name
        return (*(CONCURRENCY if is_ours else self._subject.plan.peer_concurrency), 0)


def _log_record(record: HttpRecord) -> None:
    if record.concurrency:
        rate, itl = record.output_rate, record.itl
        what = "no token" if rate is None else f"{rate:.1f} tokens/s"
        what += "" if itl is None else f", ITL {1000 * itl:.2f} ms"
        cell = f"x{record.concurrency}"
    else:
        rate = record.prompt_rate
        what = "cut off" if rate is None else f"{rate:.0f} prompt tokens/s"
        cell = "mixed prompts"
    whole = "" if record.is_whole else " (cut off)"
    say(f"  round {record.round} {cell} {record.side}: {what}{whole}")
