"""Cost of the connection limits: requests and frames per second with them and without.

``python -m benchmarks connections --rounds 40 --save``. Two servers without an engine
(`connections_server.py`), one with uvicorn's connections and one with ours, get the same load,
alternating. On a shared machine CPU seconds are more reliable than rates.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import uvloop

from benchmarks.over_http.connections_server import FRAMES
from benchmarks.runner.command import Command, positive
from benchmarks.runner.machine import Machine, describe_machine

_SIDES = ("uvicorn", "ours")
_CONNECTIONS = 8
# Of each load: the path, the end of an answer, requests per connection, weight of a request.
_LOADS = {
    "`/livez`": ("/livez", b"}", 100, 1),
    "SSE frames": ("/stream", b"0\r\n\r\n", 2, FRAMES),
}


@dataclass(frozen=True)
class Sample:
    """One turn: requests or frames per second, and microseconds of server CPU time for each."""

    load: str
    side: str
    per_second: float
    cpu_us: float


@dataclass(frozen=True)
class Run:
    """All samples of one command."""

    started: str
    command: str
    machine: Machine
    samples: list[Sample]


class _Client(asyncio.Protocol):
    """Client that sends a request whenever the previous answer is complete."""

    def __init__(self, path: str, end: bytes, requests: int) -> None:
        # The headers of an API client.
        self._request = (
            f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/json\r\n"
            "accept-encoding: gzip, deflate\r\nconnection: keep-alive\r\n"
            "user-agent: OpenAI/Python 2.0.0\r\nx-stainless-lang: python\r\n"
            "x-stainless-retry-count: 0\r\nauthorization: Bearer 0123456789abcdef\r\n\r\n"
        ).encode()
        self._end = end
        self._left = requests
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not data.endswith(self._end):
            return
        self._left -= 1
        if self._left:
            self._transport.write(self._request)
        else:
            self._transport.close()
            self.done.set_result(None)


class _Server:
    """A server in a process of its own."""

    def __init__(self, side: str, stack: ExitStack) -> None:
        command = [sys.executable, "-m", "benchmarks.over_http.connections_server", side]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(self._process.wait)
        stack.callback(self._process.kill)
        assert self._process.stdout is not None
        self.side = side
        self._port = int(self._process.stdout.readline())

    def _cpu_seconds(self) -> float:
        # The time of its only busy thread, finer than clock ticks.
        return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[0]) / 1e9

    async def sample(self, load: str) -> Sample:
        """Send one load."""
        path, end, requests, weight = _LOADS[load]
        loop = asyncio.get_running_loop()
        clients = [_Client(path, end, requests) for _ in range(_CONNECTIONS)]
        cpu, wall = self._cpu_seconds(), time.perf_counter()
        for client in clients:
            await loop.create_connection(lambda c=client: c, "127.0.0.1", self._port)  # type: ignore[misc]
        async with asyncio.timeout(60):
            await asyncio.gather(*(client.done for client in clients))
        wall = time.perf_counter() - wall
        cpu = self._cpu_seconds() - cpu
        count = requests * _CONNECTIONS * weight
        return Sample(load, self.side, count / wall, cpu / count * 1e6)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks connections", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=40, help="pairs (default: 40)")
    return Command("connections", parser, _measure, _markdown).main(argv)


def _measure(args: argparse.Namespace, command: str) -> Run:
    started = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
    with ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        servers = [_Server(side, stack) for side in _SIDES]
        samples = runner.run(_take_turns(servers, args.rounds))
    return Run(started, command, describe_machine(), samples)


async def _take_turns(servers: list[_Server], rounds: int) -> list[Sample]:
    samples = []
    for turn in range(-2, rounds):
        for load in _LOADS:
            # The first side changes, because the machine drifts.
            for server in servers if turn % 2 else servers[::-1]:
                sample = await server.sample(load)
                if turn >= 0:
                    samples.append(sample)
    return samples


def _markdown(run: Run) -> str:
    lines = [
        "# What the limits of connections cost",
        "",
        f"`{run.command}`, {run.started}, {run.machine.cpu}. Medians; ratios are medians of pairs.",
        "",
        "| load | side | a second | CPU µs each |",
        "| --- | --- | --- | --- |",
    ]
    for load in _LOADS:
        sides = [[s for s in run.samples if (s.load, s.side) == (load, side)] for side in _SIDES]
        for side, own in zip(_SIDES, sides, strict=True):
            rate = statistics.median(s.per_second for s in own)
            cpu = statistics.median(s.cpu_us for s in own)
            lines.append(f"| {load} | {side} | {rate:,.0f} | {cpu:.2f} |")
        pairs = list(zip(*sides, strict=True))
        rate = statistics.median(new.per_second / old.per_second for old, new in pairs)
        cpu = statistics.median(new.cpu_us / old.cpu_us for old, new in pairs)
        lines.append(f"| {load} | ratio | {rate:.3f} | {cpu:.3f} |")
    return "\n".join(lines)
