"""Messages between the main process and the HTTP processes, on one pipe for each."""

from __future__ import annotations

import asyncio
import enum
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.lifecycle import Standing

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from server.http_processes.engine_clients import ClientAddresses


@dataclass(frozen=True)
class ProcessWork:
    """Work of an HTTP process, which it gets once the engines are ready."""

    config: VllmConfig
    args: Namespace
    client_options: Mapping[str, Any]
    """Arguments of `EngineClient.from_vllm_config` that all clients share."""
    addresses: ClientAddresses
    main: Path
    """Unix socket of the main process."""
    owner_salt: bytes
    forkserver: str | None
    """Address of the main process's fork server."""


class Note(enum.Enum):
    """Messages without content."""

    READY = enum.auto()
    """From an HTTP process: it can answer."""
    PUBLISH = enum.auto()
    """To an HTTP process: count what it counts only when it is read."""
    PUBLISHED = enum.auto()
    """From an HTTP process: it has done so."""
    STOP = enum.auto()
    """To an HTTP process: close the connections and end."""


Message = ProcessWork | Standing | Note


class Channel:
    """Receives the messages of a pipe on the event loop; None is the end of the other process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe.fileno(), self._read)

    async def receive(self) -> Message | None:
        """Return the next message; None from the end of the other process on."""
        message = await self._messages.get()
        if message is None:
            self._messages.put_nowait(None)
        return message

    def send(self, message: Message) -> None:
        """Send a message; one to a process that has ended is dropped."""
        try:
            self._pipe.send(message)
        except OSError:
            # `receive` returns None.
            return

    def close(self) -> None:
        """Close the pipe."""
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()

    def _read(self) -> None:
        try:
            while self._pipe.poll():
                self._messages.put_nowait(self._pipe.recv())
        except (EOFError, OSError):
            self._messages.put_nowait(None)
            self._loop.remove_reader(self._pipe.fileno())
