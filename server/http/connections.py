"""Counts open connections, in total and per client, and enforces their limits."""

from __future__ import annotations

import ipaddress
import logging
import resource
from collections import Counter
from dataclasses import dataclass

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
        self._metrics = metrics
        self._open = 0
        self._refused = 0
        self._of_client: Counter[str] = Counter()

    def enter(self, address: tuple[str, int] | None) -> ConnectionSlot:
        """Count a connection from `address`; its slot holds the error if it is refused."""
        client = client_of(address[0]) if address is not None else ""
        error = self._too_many(client)
        if error is not None:
            self._metrics.observe_connection_end(error.code)
            self._refused += 1
            return ConnectionSlot(self, client, error, reports=self._refused <= _MAX_REPORTED)
        self._open += 1
        self._of_client[client] += 1
        self._metrics.observe_open_connections(self._open)
        return ConnectionSlot(self, client)

    def leave(self, slot: ConnectionSlot) -> None:
        """Release the slot of a connection that has ended."""
        if slot.refusal is not None:
            self._refused -= 1
            return
        self._open -= 1
        self._of_client[slot.client] -= 1
        if not self._of_client[slot.client]:
            del self._of_client[slot.client]
        self._metrics.observe_open_connections(self._open)

    def count(self, reason: str) -> None:
        """Count a connection that a limit has ended."""
        self._metrics.observe_connection_end(reason)

    def _too_many(self, client: str) -> ServerError | None:
        if self._open >= self.limit:
            return TooManyConnectionsError(
                f"The server has {self.limit} open connections, its limit (--max-connections).",
                retry_after_s=_RETRY_S,
            )
        if self._of_client[client] >= self.limit_of_client:
            return ClientConnectionsError(
                f"Your address has {self.limit_of_client} open connections, the limit for one "
                "client (--max-connections-per-client).",
                retry_after_s=_RETRY_S,
            )
        return None


@dataclass(eq=False, slots=True)
class ConnectionSlot:
    """The slot of one connection; `refusal` is set if it exceeds a limit.

    `reports` says whether the refusal is sent before the connection is closed.
    """

    connections: Connections
    client: str
    refusal: ServerError | None = None
    reports: bool = True

    def leave(self) -> None:
        """Release the slot; call it once."""
        self.connections.leave(self)

    def count(self, reason: str) -> None:
        """Count the limit that ended this connection."""
        self.connections.count(reason)


def client_of(host: str) -> str:
    """Return the unit of the per-client limit: an IPv4 address or an IPv6 /64 network.

    A host with one IPv6 address usually owns its whole /64.
    """
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


def _connection_limit(wanted: int) -> int:
    """Return the number of connections that the limit of open files allows, at most `wanted`.

    Raises the soft limit first where needed and permitted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = max(soft - _OTHER_FILES, soft // 2)
    logger.warning(
        "at most %d connections instead of %d (--max-connections): the process may open %d files",
        *(allowed, wanted, soft),
    )
    return allowed
