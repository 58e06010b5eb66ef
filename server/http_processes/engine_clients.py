"""Engine clients of several processes for the same engines, with vLLM's client count and index.

The main process is client 0 and starts the engines. An engine reports ready once, to the first
socket of each client, and vLLM's client waits for it. A client that comes later gets these
messages from this process, on another address, and then binds the address that the engines
connect to: their sockets reconnect by themselves, so a process that died is replaced the same way
as the first one is started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq
from vllm.utils.network_utils import get_open_zmq_ipc_path
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.admission_control import SharedAdmissionStats
from vllm.v1.engine.utils import get_engine_zmq_addresses, launch_core_engines
from vllm.v1.executor import Executor

from rbln_backend.api.requests import REQUESTS_OF
from server.host.shared_table import ALL, CountField, SharedTable
from server.host.tasks import in_daemon_thread

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from server.vllm.engine_client import EngineClient

logger = logging.getLogger(__name__)

MakeClient = Callable[..., "AsyncLLM"]
"""`EngineClient.from_vllm_config` with all arguments but those of the client."""

_PING_S = 0.5
_CONNECT_S = 30.0
"""For the records that wait at the end; the main process waits for 4 seconds."""


@dataclass(frozen=True)
class ClientAddresses:
    """ZeroMQ addresses of all clients by index, and where the coordinator publishes its counts."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stats: str | None

    def of(self, index: int) -> dict[str, Any]:
        """Return the addresses of one client in vLLM's form."""
        found: dict[str, Any] = {
            "input_address": self.inputs[index],
            "output_address": self.outputs[index],
        }
        return found if self.stats is None else {**found, "stats_update_address": self.stats}


def start_engines(
    config: VllmConfig, make: MakeClient, clients: int, *, log_stats: bool
) -> tuple[AsyncLLM, ClientAddresses]:
    """Start the engines for `clients`; return client 0, which ends them, and all addresses."""
    found = get_engine_zmq_addresses(config, clients, defer_api_server_ports=False)
    with launch_core_engines(config, Executor.get_class(config), log_stats, found) as launch:
        coordinator = launch.coordinator
        stats = None if coordinator is None else coordinator.get_stats_publish_address()
        addresses = ClientAddresses(tuple(found.inputs), tuple(found.outputs), stats)
        # It waits for the engines, which wait for the end of this block.
        client = in_daemon_thread(
            lambda: make(client_addresses=addresses.of(0), client_count=clients, client_index=0)
        )
    engine = client.result()
    resources = engine.engine_core.resources
    resources.coordinator, resources.engine_manager = coordinator, launch.engine_manager
    engine.engine_core.start_engine_core_monitor()
    return engine, addresses


def connect_client(
    config: VllmConfig, make: MakeClient, addresses: ClientAddresses, index: int
) -> AsyncLLM:
    """Return another client of running engines; `config` is that of client 0."""
    first = get_open_zmq_ipc_path()
    ranks = range(config.parallel_config.data_parallel_size)
    theirs = {**addresses.of(index), "input_address": first}
    with _ready_messages(first, [rank.to_bytes(2, "little") for rank in ranks]):
        engine = make(
            client_addresses=theirs, client_count=len(addresses.inputs), client_index=index
        )
    socket: zmq.Socket[bytes] = zmq.Socket.shadow(engine.engine_core.input_socket)
    # The engines have the identities of the sockets that are closed by now.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.unbind(first)
    socket.bind(addresses.inputs[index])
    return engine


@contextmanager
def _ready_messages(address: str, identities: list[bytes]) -> Iterator[None]:
    """Send an empty ready message from each engine; the configuration has what they reported."""
    context = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []
    try:
        for identity in identities:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.connect(address)
            socket.send(b"")
            sockets.append(socket)
        yield
    finally:
        for socket in sockets:
            socket.close(linger=0)
        context.term()


async def until_connected(engine: EngineClient) -> None:
    """Wait until all engines have connected again. Raises `TimeoutError`."""
    # Messages to an engine that has not are dropped.
    async with asyncio.timeout(_CONNECT_S):
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PING_S):
                    await engine.engine_core.is_sleeping_async()
                    return


async def end_requests_of(engine: EngineClient, index: int) -> None:
    """Abort all requests of a client whose process has ended, in all engines."""
    core = engine.engine_core
    for identity in core.core_engines:
        await core._send_input(EngineCoreRequestType.ABORT, [f"{REQUESTS_OF}{index}"], identity)


class SharedQueue(SharedAdmissionStats):
    """vLLM's number of unfinished requests, and the tokens that wait, in the shared table.

    vLLM's output processor reports the number after each change.
    """

    def __init__(self, engine: EngineClient, table: SharedTable, process: int) -> None:
        self._engine = engine
        self._table = table
        self._process = process

    def set_num_requests(self, count: int) -> None:
        tokens, flex = self._engine.own_queued_tokens()
        with self._table.locked():
            self._table.put(self._process, ALL, CountField.UNFINISHED, count)
            self._table.put(self._process, ALL, CountField.QUEUED_TOKENS, tokens)
            self._table.put(self._process, ALL, CountField.FLEX_QUEUED_TOKENS, flex)

    def get_num_requests(self) -> int:
        return int(self._table.total(ALL, CountField.UNFINISHED))

    def others_queued(self, *, flex: bool) -> int:
        """Return the waiting prompt tokens of the other processes."""
        field = CountField.FLEX_QUEUED_TOKENS if flex else CountField.QUEUED_TOKENS
        return int(self._table.total(ALL, field, but=self._process))


def share_queue(engine: EngineClient, table: SharedTable, process: int) -> None:
    """Check the limits of waiting work against that of all processes."""
    shared = SharedQueue(engine, table, process)
    engine.admission_stats = shared
    engine.output_processor.admission_stats = shared
    engine.others_queued = shared.others_queued


@asynccontextmanager
async def stopping(engine: EngineClient) -> AsyncIterator[None]:
    """Close the client at the end of the block; the engines go on."""
    try:
        yield
    finally:
        if (handler := engine.output_handler) is not None:
            handler.cancel()
        engine.shutdown()
