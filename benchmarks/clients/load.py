"""Load on an OpenAI-compatible server: ``python -m benchmarks.clients.load``, and its process.

The first line of standard input is one JSON object, a `Load`; standard output one JSON object, an
`Outcome`. Requests are `/v1/completions` streams, kept at `concurrency` at a time until all have
been sent (a closed loop). Whatever is unfinished when the budget is spent is cut off by closing its
connection.

The client shares the machine with the server, so during a stream it only records times and counts
of events; texts are parsed after the stream.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop


class ClientProcess:
    """``python -m MODULE`` with ``request`` on its standard input, started at construction."""

    def __init__(self, module: str, request: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def end(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Close its input and return its result.

        Raises ``subprocess.SubprocessError`` if it fails or exceeds the time, which ends it.
        """
        try:
            answer = self._process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        if self._process.returncode:
            raise subprocess.CalledProcessError(self._process.returncode, self._process.args)
        result: dict[str, Any] = json.loads(answer)
        return result


EVENT = b"data: {"
_TEXT = re.compile(rb'"text": ?"(?!")')
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
CUT = "cut off at the end of the time budget"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests to send: `bodies` are their JSON objects, in order.

    With `starts`, each request is sent at its own time in seconds (an open loop); else
    `concurrency` requests are kept going.
    """

    port: int
    bodies: list[dict[str, Any]]
    concurrency: int
    budget_seconds: float
    starts: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RequestOutcome:
    """One stream; times in seconds since the first request was sent.

    `tokens` is from the server's usage, else the number of events with a text. `error` is None for
    a complete stream.
    """

    sent: float
    first: float | None
    last: float | None
    tokens: int
    error: str | None

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first event."""
        return None if self.first is None else self.first - self.sent

    @property
    def itl(self) -> float | None:
        """Seconds per token after the first; None of a text that came as one event."""
        if self.first is None or self.last in (None, self.first) or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a load.

    `gaps` are the p50, p95, p99 and longest seconds between events of a stream.
    """

    seconds: float
    gaps: list[float]
    requests: list[RequestOutcome] = field(default_factory=list)


class _Stream(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes, origin: float, ended: asyncio.Future[None]) -> None:
        self.times: list[float] = []
        self.error: str | None = None
        self._request, self._origin, self._ended = request, origin, ended
        self._parts: list[bytes] = []
        self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._sent = time.perf_counter() - self._origin
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if count := data.count(EVENT):
            self.times += [time.perf_counter() - self._origin] * count
        self._parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.error = self.error or str(exc)
        if not self._ended.done():
            self._ended.set_result(None)

    def cut(self) -> None:
        """Close the connection, which the server treats as a disconnect."""
        self.error = CUT
        self._transport.abort()

    def outcome(self) -> RequestOutcome:
        body = b"".join(self._parts)
        if not body.startswith(b"HTTP/1.1 200"):
            self.error = self.error or body[:300].decode(errors="replace") or "no answer"
        usage = _USAGE.findall(body)
        texts = len(_TEXT.findall(body))
        # Events without a token, such as the usage, come at the end.
        tokens = int(usage[-1]) if usage else texts
        events = self.times[: max(tokens, texts)]
        return RequestOutcome(
            sent=self._sent,
            first=events[0] if events else None,
            last=events[-1] if events else None,
            tokens=tokens,
            error=self.error,
        )


def http_request(body: dict[str, Any], port: int) -> bytes:
    """Return one request, on a connection of its own."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def run(load: Load) -> Outcome:
    """Send `load` and wait for it, at most its budget (and a moment to close connections).

    Outcomes are in the order of sending.
    """
    loop = asyncio.get_running_loop()
    waiting = [http_request(body, load.port) for body in load.bodies][::-1]
    starts = load.starts[::-1]
    streams: list[_Stream] = []
    living: set[_Stream] = set()
    origin = time.perf_counter()

    async def client() -> None:
        while waiting:
            if starts:
                await asyncio.sleep(
                    min(starts.pop(), load.budget_seconds) - (time.perf_counter() - origin)
                )
                if not waiting:
                    return
            ended = loop.create_future()
            stream = _Stream(waiting.pop(), origin, ended)
            await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", load.port)  # type: ignore[misc]
            streams.append(stream)
            living.add(stream)
            if time.perf_counter() - origin >= load.budget_seconds:
                stream.cut()  # it was connecting while the others were cut off
            await ended
            living.discard(stream)

    def cut_all() -> None:
        waiting.clear()
        for stream in tuple(living):
            stream.cut()

    timer = loop.call_later(load.budget_seconds, cut_all)
    await asyncio.gather(*(client() for _ in range(load.concurrency)))
    timer.cancel()
    seconds = time.perf_counter() - origin
    gaps = sorted(
        after - before
        for stream in streams
        for before, after in zip(stream.times, stream.times[1:], strict=False)
    )
    return Outcome(
        seconds=seconds,
        gaps=[gaps[int(share * (len(gaps) - 1))] for share in (0.5, 0.95, 0.99, 1)] if gaps else [],
        requests=[stream.outcome() for stream in streams],
    )


def main() -> None:
    """Serve the one load on standard input."""
    load = Load(**json.loads(sys.stdin.readline()))
    print(json.dumps(asdict(uvloop.run(run(load)))))


if __name__ == "__main__":
    main()
