"""Messages arrive whole and in order through the socket that the engine's client reads from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from server.engine.socket import EngineSocket, OutputQueue

TIMEOUT_S = 20


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    with zmq.asyncio.Context() as context:
        yield context


def pair(context: zmq.asyncio.Context, folder: Path) -> tuple[zmq.Socket[Any], EngineSocket]:
    address = f"ipc://{folder / 'engine'}"
    source = context.socket(zmq.PULL)
    source.bind(address)
    sender = zmq.Context(context).socket(zmq.PUSH)
    sender.connect(address)
    return sender, EngineSocket(source)


def test_messages_come_whole_and_in_order(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    sender, receiver = pair(context, tmp_path)

    async def run() -> list[list[bytes]]:
        async def receive() -> list[list[bytes]]:
            return [
                [frame.bytes for frame in await receiver.recv_multipart(copy=False)]
                for _ in range(600)
            ]

        task = asyncio.create_task(receive())
        for number in range(600):
            sender.send_multipart([b"%d" % number, b"x" * (number % 7 * 1000)])
            if number % 50 == 0:
                # The receiver has seen everything and waits.
                await asyncio.sleep(0.002)
        return await asyncio.wait_for(task, TIMEOUT_S)

    received = asyncio.run(run())
    assert received == [[b"%d" % n, b"x" * (n % 7 * 1000)] for n in range(600)]
    receiver.close(linger=0)
    sender.close(linger=0)


def test_copies_are_bytes(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    sender, receiver = pair(context, tmp_path)
    sender.send_multipart([b"a", b"b"])
    assert asyncio.run(asyncio.wait_for(receiver.recv_multipart(), TIMEOUT_S)) == [b"a", b"b"]
    receiver.close(linger=0)
    sender.close(linger=0)


def test_closing_leaves_nothing_on_the_loop(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    sender, receiver = pair(context, tmp_path)

    async def run() -> bool:
        task = asyncio.create_task(receiver.recv_multipart(copy=False))
        await asyncio.sleep(0)
        descriptor = receiver._descriptor
        receiver.close(linger=0)
        task.cancel()
        await asyncio.wait({task})
        return asyncio.get_running_loop().remove_reader(descriptor)

    assert asyncio.run(run()) is False
    sender.close(linger=0)


async def test_the_queue_keeps_order_and_survives_a_cancelled_wait() -> None:
    queue = OutputQueue()
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    for number in range(3):
        queue.put_nowait(number)
    assert queue.qsize() == 3
    assert [await queue.get() for _ in range(3)] == [0, 1, 2]
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.put_nowait(3)
    assert await asyncio.wait_for(waiting, TIMEOUT_S) == 3
    assert queue.empty()
