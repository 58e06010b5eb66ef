"""Receives the engine's messages on the event loop without pyzmq's asyncio support.

The queue between vLLM's two tasks, which receive and process a message, is one for one reader.

pyzmq needs a future, several queries of the socket's state and a second iteration of the event loop
for every message: under a profiler, about 30 % of this process's time per token of a single stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources

_NO_WAIT, _EVENTS, _INPUT = int(zmq.DONTWAIT), int(zmq.EVENTS), int(zmq.POLLIN)


class EngineSocket(zmq.asyncio.Socket):
    """Replaces the socket on which vLLM's client awaits `recv_multipart(copy=False)`.

    One task receives on one event loop. A ZeroMQ descriptor is edge-triggered: it becomes readable
    once and is reset by a query that finds no message. So messages are received until none is left
    before waiting on the descriptor.
    """

    # pyzmq treats undeclared attributes as socket options.
    _source: zmq.asyncio.Socket
    _plain: zmq.Socket[Any]
    _descriptor: int
    _state: _Readiness

    def __init__(self, source: zmq.asyncio.Socket) -> None:
        """Receive the messages of `source`; no other receiver may use it."""
        super().__init__(_from_socket=source)  # type: ignore[call-overload,misc]  # stubs lag behind
        self._source = source
        self._plain = zmq.Socket.shadow(source.underlying)
        self._descriptor = int(source.FD)
        self._state = _Readiness(self._descriptor)

    @property
    def num_messages(self) -> int:
        """Number of messages received."""
        return self._state.num_messages

    async def recv_multipart(  # type: ignore[override]  # upstream's returns a future
        self, flags: int = 0, copy: bool = True, track: bool = False
    ) -> list[Any]:
        """Return the parts of the next message: `zmq.Frame` without `copy`, else bytes."""
        # Queried, because a receive without a message raises a costly exception.
        while not int(self._plain.get(_EVENTS)) & _INPUT:
            await self._state.readable()
        frames = [self._plain.recv(flags | _NO_WAIT, False, track)]
        # The parts of a message arrive together.
        while frames[-1].more:
            frames.append(self._plain.recv(flags | _NO_WAIT, False, track))
        self._state.num_messages += 1
        return [frame.bytes for frame in frames] if copy else frames

    def close(self, linger: int | None = None) -> None:
        """Close the socket; a pending receive ends with its task."""
        self._state.close()
        self._source.close(linger)


class _Readiness:
    """Waits for a socket's descriptor. Separate, because pyzmq's sockets set attributes slowly."""

    __slots__ = ("_descriptor", "_loop", "_waiter", "num_messages")

    def __init__(self, descriptor: int) -> None:
        self.num_messages = 0
        self._descriptor = descriptor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def readable(self) -> None:
        """Return once the descriptor becomes readable."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._wake)
        self._waiter = self._loop.create_future()
        await self._waiter

    def close(self) -> None:
        """Stop waiting."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._loop = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class OutputQueue(asyncio.Queue[Any]):
    """Unbounded queue of one reader: a dozen calls fewer per message than asyncio's."""

    def __init__(self) -> None:
        super().__init__()
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put_nowait(self, item: Any) -> None:
        """Append an item."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        """Remove and return the first item; waits for it."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()

    def qsize(self) -> int:
        """Return the number of items."""
        return len(self._items)


class DisconnectWatch:
    """Reports the first connection to a bound socket that has been closed by its other end.

    ZeroMQ itself waits for ever for a process that has gone.
    """

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        # Referenced: a socket without references is closed.
        self._monitor = socket.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
        self._events: zmq.Socket[Any] = zmq.Socket.shadow(self._monitor.underlying)
        self._lost: str | None = None

    def lost(self) -> str | None:
        """Return the socket's address once a connection was closed, None before; never waits."""
        if self._lost is None and self._events.poll(0):
            self._lost = recv_monitor_message(self._events)["endpoint"].decode()
        return self._lost


def watch_others(engine: AsyncLLM) -> DisconnectWatch | None:
    """Return the watch of data-parallel engines on other hosts, None if all run on this one."""
    parallel = engine.vllm_config.parallel_config
    if parallel.data_parallel_size_local >= parallel.data_parallel_size:
        return None
    resources: BackgroundResources = engine.engine_core.resources
    assert isinstance(resources.input_socket, zmq.asyncio.Socket)
    return DisconnectWatch(resources.input_socket)


def receive_directly(engine: AsyncLLM) -> EngineSocket:
    """Replace the output socket and queue of a new engine's client before its first request."""
    resources: BackgroundResources = engine.engine_core.resources
    assert resources.output_queue_task is None, "the client receives already"
    assert isinstance(resources.output_socket, zmq.asyncio.Socket)
    socket = EngineSocket(resources.output_socket)
    resources.output_socket = socket
    client: AsyncMPClient = engine.engine_core
    client.outputs_queue = OutputQueue()
    return socket
