"""Receives the engine's messages on the event loop without pyzmq's asyncio support.

The queue between vLLM's two tasks, which receive and process a message, is one for one reader.

pyzmq needs a future, several queries of the socket's state and a second iteration of the event loop
for every message: under a profiler, about 30 % of this process's time per token of a single stream.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from server.vllm.patches import use_output_socket

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources
    from vllm.v1.serial_utils import MsgpackDecoder

logger = logging.getLogger(__name__)

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
    _accepts: Callable[[Sequence[Any]], bool] | None

    def __init__(
        self, source: zmq.asyncio.Socket, accepts: Callable[[Sequence[Any]], bool] | None = None
    ) -> None:
        """Receive the messages of `source`, which no other receiver may use.

        Messages whose parts `accepts` returns False for are dropped.
        """
        super().__init__(_from_socket=source)  # type: ignore[call-overload,misc]  # stubs lag behind
        self._source = source
        self._plain = zmq.Socket.shadow(source.underlying)
        self._descriptor = int(source.FD)
        self._state = _Readiness(self._descriptor)
        self._accepts = accepts

    @property
    def num_messages(self) -> int:
        """Number of messages received."""
        return self._state.num_messages

    async def recv_multipart(  # type: ignore[override]  # upstream's returns a future
        self, flags: int = 0, copy: bool = True, track: bool = False
    ) -> list[Any]:
        """Return the parts of the next message: `zmq.Frame` without `copy`, else bytes."""
        frames: list[Any] = []
        while not frames or (self._accepts is not None and not self._accepts(frames)):
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


class EngineWatch:
    """Reports the first engine whose connection to a bound ROUTER socket has ended.

    ZeroMQ itself waits for ever for a process that has gone. The port is open to every host of the
    network: a connection that ends may be a port scan's, so that each end is a reason to check
    whether the engines are still connected.
    """

    def __init__(self, source: zmq.asyncio.Socket, engines: Sequence[bytes]) -> None:
        """`engines` are the ZeroMQ identities of the engines, which are connected."""
        # Referenced: a socket without references is closed.
        self._monitor = source.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
        self._events: zmq.Socket[Any] = zmq.Socket.shadow(self._monitor.underlying)
        self._socket: zmq.Socket[Any] = zmq.Socket.shadow(source.underlying)
        self._engines = engines
        self._checks = 0

    def lost(self) -> str | None:
        """Return the rank and address of an engine that has gone, None before; never waits."""
        with suppress(zmq.Again):
            while self._socket.recv_multipart(_NO_WAIT):
                # No engine sends anything here once it is ready.
                log_stranger("to the engines' input port")
        while self._events.poll(0):
            self._events.recv_multipart()
            # A closed connection may still take a message at the moment of this event.
            self._checks = 2
        if not self._checks:
            return None
        self._checks -= 1
        for engine in self._engines:
            if not self._is_connected(engine):
                self._checks = 1
                rank = int.from_bytes(engine, "little")
                return f"{self._socket.getsockopt_string(zmq.LAST_ENDPOINT)} (rank {rank})"
        return None

    def _is_connected(self, engine: bytes) -> bool:
        """Send an engine a message without effect; ZeroMQ refuses one for an unknown identity."""
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.send_multipart((engine, *_ABORT_NOTHING), _NO_WAIT)
        except zmq.Again:
            return True
        except zmq.ZMQError:
            return False
        finally:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        return True


_ABORT_NOTHING = (b"\x01", msgspec.msgpack.encode([]))
"""vLLM's message that aborts requests, for no request (`EngineCoreRequestType.ABORT`)."""


def log_stranger(where: str) -> None:
    """Log the first messages that no engine has sent."""
    if next(_strange_messages) < _MAX_LOGGED:
        logger.warning("ignored a message %s: it is from no engine of this deployment", where)


_strange_messages, _MAX_LOGGED = itertools.count(), 20


def decode_outputs(
    decoder: MsgpackDecoder, frames: Any, ranks: Collection[int]
) -> EngineCoreOutputs | None:
    """Return the message of an engine of one of `ranks`, None for any other message."""
    try:
        outputs: EngineCoreOutputs = decoder.decode(frames)
    except Exception:  # noqa: BLE001 (bytes of a stranger, and vLLM's decoder runs hooks)
        return None
    return outputs if outputs.engine_index in ranks else None


def _is_from_engine(client: AsyncMPClient, decoder: MsgpackDecoder, frames: Any) -> bool:
    outputs = decode_outputs(decoder, frames, client.engine_ranks_managed)
    call = None if outputs is None else outputs.utility_output
    if outputs is None or (call is not None and call.call_id not in client.utility_results):
        log_stranger("to the engines' output port")
        return False
    return True


def _has_others(engine: AsyncLLM) -> bool:
    """Return True if engines run on other hosts, so that ports are open to the network."""
    parallel = engine.vllm_config.parallel_config
    return parallel.data_parallel_size_local < parallel.data_parallel_size


def watch_others(engine: AsyncLLM) -> EngineWatch | None:
    """Return the watch of data-parallel engines on other hosts, None if all run on this one."""
    if not _has_others(engine):
        return None
    resources: BackgroundResources = engine.engine_core.resources
    assert isinstance(resources.input_socket, zmq.asyncio.Socket)
    return EngineWatch(resources.input_socket, engine.engine_core.core_engines)


def receive_directly(engine: AsyncLLM) -> EngineSocket:
    """Replace the output socket and queue of a new engine's client before its first request."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder

    resources: BackgroundResources = engine.engine_core.resources
    assert isinstance(resources.output_socket, zmq.asyncio.Socket)
    client: AsyncMPClient = engine.engine_core
    accepts = None
    if _has_others(engine):
        accepts = partial(_is_from_engine, client, MsgpackDecoder(EngineCoreOutputs))
    socket = EngineSocket(resources.output_socket, accepts)
    use_output_socket(engine, socket, OutputQueue())
    return socket
