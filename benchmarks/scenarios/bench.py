"""Shared part of the scenarios: servers, samples that are repeated when disturbed, figures."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.clients.http_sample import Meter, send_load, settle
from benchmarks.clients.load import Load, RequestOutcome
from benchmarks.engines.server_process import ServerError, ServerProcess, ServerSide, Serving
from benchmarks.engines.sides import server_side
from benchmarks.models.shapes import SHAPES, find_checkpoint
from benchmarks.models.text_checkpoint import prompt_text, text_checkpoint
from benchmarks.runner.command import DISTURBED_CORES, Figure, repeat_disturbed, rotated, say

Values = dict[str, tuple[float, str]]
"""Values of one sample with their units, by the names of figures."""
_BUDGET_S = 300.0
_KV_CACHE_BYTES = 1 << 30
_WARM_TOKENS = 4
# vLLM's CPU backend computes for minutes at each start of 1.2b with its own chunk of 2,048.
_LARGE, _LARGE_CHUNK = "1.2b", 256


class OutOfTimeError(Exception):
    """The time bound of the command has passed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one sample, and the cores that other processes kept busy."""

    values: Values
    other_busy_cores: float


@dataclass(slots=True, kw_only=True)
class Bench:
    """Settings and figures of one scenario; `deadline` is a `time.monotonic`."""

    models: Sequence[str]
    sides: Sequence[str]
    rounds: int
    folder: Path
    quick: bool = False
    deadline: float = math.inf
    figures: dict[tuple[str, str, str], Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    described: dict[str, str] = field(default_factory=dict)

    def side(self, name: str) -> ServerSide:
        """Return a side; `ours-POLICY` is ours with that `--prefill-policy`."""
        ours, _, policy = name.partition("-")
        if ours == "ours" and policy:
            return server_side("ours").with_flags("--prefill-policy", policy, name=name)
        return server_side(name)

    @contextmanager
    def serving(self, model: str, length: int, *flags: str) -> Iterator[list[ServerProcess]]:
        """Start every side for texts of `length` tokens; a side that fails is noted and left out.

        `flags` are for both flavours of vLLM.
        """
        path = checkpoint_folder(model)
        positions = json.dumps({"max_position_embeddings": length})
        with ExitStack() as stack:
            servers = []
            for name in self.sides:
                side = self.side(name).with_flags("--hf-overrides", positions, *flags)
                self.described[name] = f"{side.note}; {' '.join(flags)}".removesuffix("; ")
                serving = replace(
                    Serving.of(path, length, _KV_CACHE_BYTES),
                    chunk_tokens=_LARGE_CHUNK if model == _LARGE else None,
                )
                say(f"  {model}: starting {name}")
                server = ServerProcess(side, serving, self.folder / f"{model}-{name}.log")
                try:
                    servers.append(stack.enter_context(server))
                except (ServerError, OSError) as error:
                    self.notes.append(f"**Failed**: {name} on {model}: {first_line(error)}")
                    say(f"  {self.notes[-1]}")
            yield servers

    def each_round(self, servers: Sequence[ServerProcess]) -> Iterator[tuple[int, ServerProcess]]:
        """Yield each server in each round, another one first in every round."""
        for number in range(self.rounds):
            for server in rotated(servers, number):
                yield number, server

    def measure(
        self,
        model: str,
        number: int,
        server: ServerProcess,
        take: Callable[[str], Values],
    ) -> None:
        """Take a sample of round `number` from an awake server, and add its values.

        `take` gets a seed for its prompts that no other round or attempt has.
        """
        self.check_time()

        def once(attempt: int) -> Sample:
            with server.awake():
                settle(server)
                # Caches and pages of a server that slept are cold, unlike those of a busy one.
                warm = server.body(prompt_text(random.Random(), _WARM_TOKENS), _WARM_TOKENS)
                send(server, [warm])
                meter = Meter(server)
                values = take(f"{number} {attempt}")
                return Sample(values, meter.read()[1])

        self.take(model, server.side.name, number, once)

    def take(self, model: str, side: str, number: int, once: Callable[[int], Sample]) -> None:
        """Take a sample, again while it is disturbed, and add its values, None if it stays so."""
        last = repeat_disturbed(once)[-1]
        is_quiet = last.other_busy_cores <= DISTURBED_CORES
        for name, (value, unit) in last.values.items():
            self.add(model, side, number, name, value if is_quiet else None, unit)
            mark = "" if is_quiet else " (disturbed)"
            say(f"  {model} round {number} {side} {name}: {value:.4g} {unit}{mark}")

    def add(
        self,
        model: str,
        side: str,
        number: int,
        name: str,
        value: float | None,
        unit: str,
    ) -> None:
        """Set the value of a figure in a round; earlier rounds without one have None."""
        figure = Figure(name=name, model=model, side=side, unit=unit, values=[])
        figure = self.figures.setdefault((name, model, side), figure)
        figure.values.extend([None] * (number + 1 - len(figure.values)))
        figure.values[number] = value

    def value(self, model: str, side: str, number: int, name: str) -> float | None:
        """Return the value of a figure in a round; None if it is disturbed or missing."""
        figure = self.figures.get((name, model, side))
        return figure.values[number] if figure and number < len(figure.values) else None

    def check_time(self) -> None:
        """Raise `OutOfTimeError` after the deadline."""
        if time.monotonic() > self.deadline:
            raise OutOfTimeError


def checkpoint_folder(model: str) -> Path:
    """Return the checkpoint of a shape with a tokenizer, or the folder `model`."""
    if model in SHAPES:
        return text_checkpoint(find_checkpoint(model).path)
    return Path(model).resolve()


def send(
    server: ServerProcess,
    bodies: Sequence[dict[str, Any]],
    *,
    at: Sequence[float] = (),
    concurrency: int = 0,
) -> tuple[float, list[RequestOutcome]]:
    """Send the bodies, all at once unless `at` or `concurrency`; return seconds and outcomes."""
    load = Load(
        port=server.serving.port,
        bodies=list(bodies),
        concurrency=concurrency or len(bodies),
        budget_seconds=_BUDGET_S,
        starts=list(at),
    )
    answer = send_load(server, load)
    return answer["seconds"], [RequestOutcome(**request) for request in answer["requests"]]


def firsts(outcomes: Sequence[RequestOutcome]) -> list[float]:
    """Return the seconds to the first tokens, sorted. Raises ServerError without one."""
    found = sorted(outcome.ttft for outcome in outcomes if outcome.ttft is not None)
    if len(found) != len(outcomes):
        raise ServerError(f"{len(outcomes) - len(found)} requests had no token")
    return found


def prompts(seed: str, count: int, tokens: int) -> list[str]:
    """Return prompts that no other seed gives."""
    chooser = random.Random(seed)
    return [prompt_text(chooser, tokens) for _ in range(count)]


def first_line(error: Exception) -> str:
    """Return the first line of an error."""
    return (str(error).splitlines() or [repr(error)])[0]
