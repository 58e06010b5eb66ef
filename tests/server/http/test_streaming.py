"""Committing to a stream: what is held back, what raises, what is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from server.errors import InvalidValueError
from server.http.streaming import HeldStream, commit, until_disconnect
from server.request.body import ClientGoneError


def prelude(frame: str) -> bool:
    return frame.startswith(":")


class Source:
    """A stream of frames; an exception among them is raised, "wait" waits for `go_on`."""

    def __init__(self, *frames: str | Exception) -> None:
        self.frames = frames
        self.go_on = asyncio.Event()
        self.closed = False

    async def stream(self) -> AsyncGenerator[str, None]:
        try:
            for frame in self.frames:
                if isinstance(frame, Exception):
                    raise frame
                if frame == "wait":
                    await self.go_on.wait()
                    continue
                yield frame
        finally:
            self.closed = True


async def collect(stream: HeldStream) -> list[str]:
    return [frame async for frame in stream]


@pytest.mark.parametrize("frames", [(), ("a",), (":", "a", "b"), (":",), ("a", ":", "b")])
async def test_nothing_is_lost_or_reordered(frames: tuple[str, ...]) -> None:
    source = Source(*frames)
    assert await collect(await commit(source.stream(), prelude, 1.0)) == list(frames)
    assert source.closed


async def test_an_error_after_prelude_only_raises() -> None:
    source = Source(":", InvalidValueError("bad"), "a")
    with pytest.raises(InvalidValueError):
        await commit(source.stream(), prelude, 1.0)
    assert source.closed


async def test_an_error_after_content_stays_in_the_stream() -> None:
    stream = await commit(Source("a", InvalidValueError("bad")).stream(), prelude, 1.0)
    assert await anext(stream) == "a"
    with pytest.raises(InvalidValueError):
        await anext(stream)


async def test_a_slow_stream_is_returned_at_the_timeout_and_goes_on() -> None:
    source = Source(":", "wait", "a", "b")
    stream = await commit(source.stream(), prelude, 0.01)
    assert await anext(stream) == ":"
    source.go_on.set()
    assert await collect(stream) == ["a", "b"]


async def test_a_slow_stream_may_end_without_a_frame() -> None:
    source = Source("wait")
    stream = await commit(source.stream(), prelude, 0.01)
    source.go_on.set()
    assert await collect(stream) == []


@pytest.mark.parametrize("consumed", [0, 1])
async def test_closing_a_waiting_stream_closes_the_source(consumed: int) -> None:
    source = Source(":", "wait", "a")
    stream = await commit(source.stream(), prelude, 0.01)
    for _ in range(consumed):
        await anext(stream)
    await stream.aclose()
    await asyncio.sleep(0.01)
    assert source.closed


async def test_cancelling_the_commit_closes_the_source() -> None:
    source = Source("wait")
    task = asyncio.create_task(commit(source.stream(), prelude, 10.0))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.closed


async def test_work_that_ends_first_wins() -> None:
    async def receive() -> dict[str, str]:
        await asyncio.sleep(10)
        return {"type": "http.disconnect"}

    async def work() -> int:
        return 5

    assert await until_disconnect(receive, work()) == 5


async def test_a_disconnect_cancels_the_work() -> None:
    cancelled = asyncio.Event()

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            cancelled.set()

    with pytest.raises(ClientGoneError):
        await until_disconnect(receive, work())
    assert cancelled.is_set()
