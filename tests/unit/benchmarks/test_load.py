"""The client of a load, against scripted servers on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import uvloop

from benchmarks.clients.load import CUT, Load, Outcome, run

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
_TOKEN = b'data: {"choices":[{"text":" bake"}]}\n\n'
_USAGE = b'data: {"choices":[],"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n'

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def _send(
    answer: Answer, *, requests: int, concurrency: int, budget: float, starts: Sequence[float] = ()
) -> Outcome:
    return uvloop.run(_serve_and_send(answer, requests, concurrency, budget, starts))


async def _serve_and_send(
    answer: Answer, requests: int, concurrency: int, budget: float, starts: Sequence[float]
) -> Outcome:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        await reader.readexactly(length)
        answering = asyncio.create_task(answer(writer))
        # The end of the input is a client that left.
        leaving = asyncio.create_task(reader.read())
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        answering.cancel()
        leaving.cancel()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        bodies = [{"prompt": str(number)} for number in range(requests)]
        load = Load(
            port=port,
            bodies=bodies,
            concurrency=concurrency,
            budget_seconds=budget,
            starts=[*starts],
        )
        outcome = await run(load)
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0.01)
    return outcome


def test_tokens_come_from_the_usage_or_else_from_the_texts() -> None:
    async def with_usage(writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD + _TOKEN)
        await asyncio.sleep(0.05)
        writer.write(2 * _TOKEN + _USAGE)

    async def without(writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD + 3 * _TOKEN + b'data: {"choices":[{"text":""}]}\n\n')

    for answer, tokens in ((with_usage, 7), (without, 3)):
        outcome = _send(answer, requests=3, concurrency=2, budget=30.0)
        assert [request.tokens for request in outcome.requests] == [tokens] * 3
        assert all(request.error is None for request in outcome.requests)
    slow = _send(with_usage, requests=1, concurrency=1, budget=30.0)
    (request,) = slow.requests
    assert request.ttft is not None and request.itl is not None
    assert request.last - request.first > 0.01


def test_no_more_requests_run_at_a_time_than_requested() -> None:
    running = peak = 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.02)
        writer.write(_HEAD + _TOKEN)
        running -= 1

    outcome = _send(answer, requests=7, concurrency=3, budget=30.0)
    assert len(outcome.requests) == 7
    assert peak == 3


def test_requests_of_an_open_loop_are_sent_at_their_times() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        writer.write(_HEAD + _TOKEN)

    outcome = _send(answer, requests=3, concurrency=3, budget=30.0, starts=[0.0, 0.1, 0.2])
    sent = [request.sent for request in outcome.requests]
    assert sent == sorted(sent)
    # A timer of the loop may fire early by the clock's resolution.
    assert sent[1] >= 0.09 and sent[2] >= 0.19
    # None of them waited for another one's answer.
    assert outcome.seconds < 0.9
    cut = _send(answer, requests=2, concurrency=2, budget=0.1, starts=[0.0, 5.0])
    assert [request.error for request in cut.requests] == [CUT]


def test_a_load_ends_with_its_budget() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD + 2 * _TOKEN)
        await asyncio.sleep(60)

    outcome = _send(answer, requests=3, concurrency=2, budget=0.2)
    assert [(r.error, r.tokens) for r in outcome.requests] == [(CUT, 2)] * 2


def test_an_error_of_the_server_is_an_error() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\nno such model")

    outcome = _send(answer, requests=1, concurrency=1, budget=30.0)
    assert "no such model" in str(outcome.requests[0].error)
    assert outcome.requests[0].tokens == 0
