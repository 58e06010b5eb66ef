"""Starts model processes as forks of a template process, which has imported what they import.

Imports take most of the processor time of a start. The template is forked from this process before
it has threads, and imports while this process starts to listen. Invariant: the template and all
that is forked from it end when this process ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

MESSAGE_BYTES = 1 << 20


class TemplateError(Exception):
    """The template process has ended."""


@dataclass(eq=False)
class ForkedCommand:
    """One `rbln-serve` command in a fork of the template; used from the event loop only."""

    pid: int
    ended: asyncio.Future[int] = field(repr=False)
    """The exit status; negative: the signal that ended it."""

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return not self.ended.done()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ProcessTemplate:
    """This process's end of the connection to the template."""

    def __init__(
        self, serve_forks: Callable[[socket.socket], None], close: Iterable[socket.socket] = ()
    ) -> None:
        """Fork the template, which runs `serve_forks`; call this before any thread exists.

        The template closes its copies of the sockets in `close`.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            for inherited in (self._socket, *close):
                inherited.close()
            serve_forks(theirs)
            os._exit(0)
        theirs.close()
        self._has_answered = False

    def close(self) -> None:
        """End the template once its commands have ended."""
        self._socket.close()
        if not self._has_answered:
            # It still imports.
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    async def start(
        self, args: Sequence[str], environ: Mapping[str, str], output: int | None = None
    ) -> ForkedCommand:
        """Start `rbln-serve args`; `output` is a descriptor for its standard output.

        Raises `TemplateError`.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        message = json.dumps({"args": list(args), "environ": dict(environ)}).encode()
        descriptors = [theirs.fileno()] + ([] if output is None else [output])
        with theirs:
            try:
                socket.send_fds(self._socket, [message], descriptors)
            except OSError as error:
                ours.close()
                raise TemplateError(f"the template process has ended: {error}") from None
        try:
            pid = await loop.sock_recv(ours, MESSAGE_BYTES)
        except BaseException:
            ours.close()
            raise
        if not pid:
            ours.close()
            raise TemplateError("the template process has ended")
        self._has_answered = True
        ended: asyncio.Future[int] = loop.create_task(_status(ours))
        return ForkedCommand(int(pid), ended)


async def _status(connection: socket.socket) -> int:
    """Return the exit status that the template sends."""
    with connection:
        message = await asyncio.get_running_loop().sock_recv(connection, MESSAGE_BYTES)
    # The waiting process was killed, and with it the command.
    return int(message) if message else -signal.SIGKILL
