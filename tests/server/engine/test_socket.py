"""Messages arrive whole and in order through the socket that the engine's client reads from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from socket import create_connection
from typing import Any

import pytest
import zmq
import zmq.asyncio

from server.engine.socket import EngineSocket, EngineWatch, OutputQueue

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


def test_only_the_end_of_an_engine_is_reported(context: zmq.asyncio.Context) -> None:
    source = context.socket(zmq.ROUTER)
    port = source.bind_to_random_port("tcp://127.0.0.1")
    plain = zmq.Context(context)
    # A context waits for open sockets, also after a failure.
    context.linger = plain.linger = 0

    def peer(kind: int, identity: bytes | None = None) -> zmq.Socket[Any]:
        made = plain.socket(kind)
        if identity is not None:
            made.setsockopt(zmq.IDENTITY, identity)
        made.connect(f"tcp://127.0.0.1:{port}")
        return made

    engines = [b"\x00\x00", b"\x01\x00"]
    peers = [peer(zmq.DEALER, identity) for identity in engines]
    receiver = zmq.Socket.shadow(source.underlying)
    for one in peers:
        one.send(b"ready")
        assert receiver.recv_multipart()[1] == b"ready"
    watch = EngineWatch(source, engines)

    def lost(seconds: float) -> str | None:
        until = time.monotonic() + seconds
        while (found := watch.lost()) is None and time.monotonic() < until:
            time.sleep(0.01)
        return found

    for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03"):
        with create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(greeting)
    # One with the identity of an engine is refused by ZeroMQ.
    for identity in (None, b"other", engines[1]):
        stranger = peer(zmq.DEALER, identity)
        stranger.send_multipart([b"junk", b"junk"])
        time.sleep(0.05)
        stranger.close(linger=0)
    assert lost(0.5) is None
    assert not int(receiver.get(zmq.EVENTS)) & zmq.POLLIN
    # What the check sends has no effect on an engine.
    assert {tuple(peers[0].recv_multipart()) for _ in range(2)} == {(b"\x01", b"\x90")}
    peers[1].close(linger=0)
    assert (lost(TIMEOUT_S) or "").endswith(f"{port} (rank 1)")
    peers[0].close(linger=0)
    watch._monitor.close(linger=0)
    source.close(linger=0)


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
