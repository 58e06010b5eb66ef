"""The number of open connections and their limits; a transport with a lingering close.

Closing a socket while the peer still sends makes the kernel send a reset, which can discard a
response that the peer has not read. So the connection lingers: it sends EOF and drops further
input. Invariants: a lingering connection is closed after `bounds.LINGER_S` seconds or
`LINGER_BYTES`; in a body after `LINGER_S` without input, `BODY_LINGER_S` or `BODY_LINGER_BYTES`; a
connection whose peer stops reading is closed after `WRITE_TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server import bounds
from server.errors import ClientConnectionsError, ServerError, TooManyConnectionsError
from server.observability.metrics import ServerMetrics
from server.settings import ServerSettings

logger = logging.getLogger(__name__)

_OTHER_FILES = 256
"""File descriptors reserved for everything but connections."""
_MAX_REPORTED = 64
"""Refused connections at once that get an error response; further ones are closed."""
_RETRY_S = 1.0


class Connections:
    """Counts connections and refuses those above a limit. Used from the event loop only."""

    def __init__(self, settings: ServerSettings, metrics: ServerMetrics) -> None:
        """Raise the process's limit of open files as far as needed and permitted."""
        self.limit = _connection_limit(settings.max_connections)
        self.limit_of_client = settings.max_connections_per_client or max(1, self.limit * 3 // 4)
        self.metrics = metrics
        self._open = 0
        self._refused = 0
        self._of_client: Counter[str] = Counter()

    def enter(self, address: tuple[str, int] | None) -> ConnectionSlot:
        """Count a connection from `address`; its slot holds the error if it is refused."""
        client = get_client(address[0]) if address is not None else ""
        error: ServerError | None = None
        if self._open >= self.limit:
            error = TooManyConnectionsError(
                f"The server has {self.limit} open connections, its limit (--max-connections).",
                retry_after_s=_RETRY_S,
            )
        elif self._of_client[client] >= self.limit_of_client:
            error = ClientConnectionsError(
                f"Your address has {self.limit_of_client} open connections, the limit for one "
                "client (--max-connections-per-client).",
                retry_after_s=_RETRY_S,
            )
        if error is not None:
            self.metrics.count("rbln_http_connection_refusals_total", error.code)
            self._refused += 1
            return ConnectionSlot(self, client, error, reports=self._refused <= _MAX_REPORTED)
        self._open += 1
        self._of_client[client] += 1
        self.metrics.set("rbln_http_connections", self._open)
        return ConnectionSlot(self, client)

    def leave(self, slot: ConnectionSlot) -> None:
        if slot.refusal is not None:
            self._refused -= 1
            return
        self._open -= 1
        self._of_client[slot.client] -= 1
        if not self._of_client[slot.client]:
            del self._of_client[slot.client]
        self.metrics.set("rbln_http_connections", self._open)


@dataclass(eq=False, slots=True)
class ConnectionSlot:
    """The slot of one connection; `refusal` is set if it exceeds a limit.

    `reports` says whether the refusal is sent before the connection is closed.
    """

    connections: Connections
    client: str
    refusal: ServerError | None = None
    reports: bool = True

    def count(self, reason: str) -> None:
        """Count the limit that ended this connection."""
        self.connections.metrics.count("rbln_http_connection_refusals_total", reason)


def get_client(host: str) -> str:
    """Return the unit of the per-client limit: an IPv4 address or an IPv6 /64 network.

    A host with one IPv6 address usually owns its whole /64.
    """
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


def _connection_limit(limit: int) -> int:
    """Return the number of connections that the limit of open files allows, at most `limit`.

    Raises the soft limit first where needed and permitted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limit + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return limit
    allowed = max(soft - _OTHER_FILES, soft // 2)
    logger.warning(
        "at most %d connections instead of %d (--max-connections): the process may open %d files",
        allowed,
        limit,
        soft,
    )
    return allowed


class LingeringTransport(asyncio.Transport):
    """Wraps the transport of a uvicorn protocol and changes how it is closed."""

    def __init__(
        self, transport: asyncio.Transport, slot: ConnectionSlot, peer_sends: Callable[[], bool]
    ) -> None:
        """Wrap `transport`; `peer_sends` returns whether a request is not yet complete."""
        super().__init__()
        # Called for every frame of a stream, so it is not wrapped.
        self.write = transport.write  # type: ignore[method-assign]
        self.slot = slot
        # Whether further input is dropped.
        self.leaving = False
        self._transport = transport
        self._peer_sends = peer_sends
        self._loop = asyncio.get_running_loop()
        self._dropped = self._dropped_before = 0
        self._drop_until = 0.0
        self._drop_bytes = 0
        self._on_limit: Callable[[], None] = self.abort
        self._unsent = 0
        self._drop_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        """Return whether no further requests are accepted."""
        return self.leaving or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once everything is sent, lingering if the peer still sends."""
        if self.is_closing():
            return
        if self._peer_sends():
            self.linger(is_body=True)
        else:
            self.leaving = True
            self._transport.close()
            if self._transport.get_write_buffer_size():
                self.watch_writing()

    def linger(self, *, is_body: bool = False) -> None:
        """Send EOF and drop further input, such as a body, until a limit is reached."""
        if self.is_closing():
            return
        self.leaving = True
        # TLS has no half-close.
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()
        self.start_dropping(self.abort, is_body=is_body)

    def write_early(self, head: bytes) -> None:
        """Send the bytes with which the next write begins."""

        def write_rest(data: bytes) -> None:
            self.write = self._transport.write  # type: ignore[method-assign]
            self.write(data[len(head) :])

        self.write(head)
        self.write = write_rest  # type: ignore[method-assign, assignment]

    def start_dropping(self, on_limit: Callable[[], None], *, is_body: bool) -> None:
        """Begin to drop input; call `on_limit` once it is too slow or too much."""
        self.stop_dropping()
        self._on_limit = on_limit
        self._dropped = self._dropped_before = 0
        self._drop_bytes = bounds.BODY_LINGER_BYTES if is_body else bounds.LINGER_BYTES
        self._drop_until = self._loop.time() + (bounds.BODY_LINGER_S if is_body else 0.0)
        self._drop_timer = self._loop.call_later(bounds.LINGER_S, self._check_dropped)

    def drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > self._drop_bytes:
            self._on_limit()

    def stop_dropping(self) -> None:
        if self._drop_timer is not None:
            self._drop_timer.cancel()
            self._drop_timer = None

    def cut(self, reason: str) -> None:
        """Abort the connection and count the reason."""
        if not self._transport.is_closing():
            self.slot.count(reason)
        self.abort()

    def abort(self) -> None:
        """Close the connection immediately; unsent data is lost."""
        self.leaving = True
        self._transport.abort()

    def watch_writing(self) -> None:
        """Start the write timeout: the peer must read something every `WRITE_TIMEOUT_S`."""
        if self._write_timer is None:
            self._start_write_timer()

    def stop_watching(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def lost(self) -> None:
        """Cancel all timers and release the slot of a closed connection."""
        self.stop_watching()
        self.stop_dropping()
        self.slot.connections.leave(self.slot)

    def _check_dropped(self) -> None:
        if self._dropped == self._dropped_before or self._loop.time() > self._drop_until:
            self._on_limit()
            return
        self._dropped_before = self._dropped
        self._drop_timer = self._loop.call_later(bounds.LINGER_S, self._check_dropped)

    def _start_write_timer(self) -> None:
        self._unsent = self._transport.get_write_buffer_size()
        timeout_s = bounds.WRITE_TIMEOUT_S
        self._write_timer = self._loop.call_later(timeout_s, self._on_write_timeout)

    def _on_write_timeout(self) -> None:
        self._write_timer = None
        # The application is paused, so the buffer shrinks if the peer reads anything.
        if self._transport.get_write_buffer_size() < self._unsent:
            self._start_write_timer()
        else:
            self.slot.count("write_timeout")
            self.abort()
