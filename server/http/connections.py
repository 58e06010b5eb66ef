"""How many connections there are, in all and from one client, and how many there may be."""

from __future__ import annotations

import ipaddress
import logging
import resource
from collections import Counter

from server.errors import ClientConnectionsError, ServerError, TooManyConnectionsError
from server.observability.metrics import ServerMetrics
from server.settings import ServerSettings

logger = logging.getLogger(__name__)

_OTHER_FILES = 256
"""Files that the process keeps open besides connections, generously."""
_MAX_TOLD = 64
"""Refused connections that are told why at once; those beyond them are closed without a word."""
_RETRY_S = 1.0


class Connections:
    """Counts connections and says which are too many. Used from the event loop only."""

    def __init__(self, settings: ServerSettings, metrics: ServerMetrics) -> None:
        """Raises the limit of open files as far as it may be and has to be."""
        self.limit = _room(settings.max_connections)
        self.limit_of_client = settings.max_connections_per_client or max(1, self.limit * 3 // 4)
        self._metrics = metrics
        self._open = 0
        self._told = 0
        self._of_client: Counter[str] = Counter()

    def enter(self, address: tuple[str, int] | None) -> Place:
        """Count a connection from `address`, or none of TCP; its place says whether it may stay."""
        client = client_of(address[0]) if address is not None else ""
        error = self._too_many(client)
        if error is not None:
            self._metrics.observe_connection_end(error.code)
            self._told += 1
            return Place(self, client, error, tell=self._told <= _MAX_TOLD)
        self._open += 1
        self._of_client[client] += 1
        self._metrics.observe_open_connections(self._open)
        return Place(self, client, None, tell=True)

    def leave(self, place: Place) -> None:
        """Forget a connection that has ended."""
        if place.refusal is not None:
            self._told -= 1
            return
        self._open -= 1
        self._of_client[place.client] -= 1
        if not self._of_client[place.client]:
            del self._of_client[place.client]
        self._metrics.observe_open_connections(self._open)

    def count(self, reason: str) -> None:
        """Count a connection that a limit has ended."""
        self._metrics.observe_connection_end(reason)

    def _too_many(self, client: str) -> ServerError | None:
        if self._open >= self.limit:
            return TooManyConnectionsError(
                f"The server has {self.limit} connections open, the most that it takes "
                "(--max-connections).",
                retry_after_s=_RETRY_S,
            )
        if self._of_client[client] >= self.limit_of_client:
            return ClientConnectionsError(
                f"Your address has {self.limit_of_client} connections open, the most that one "
                "may have (--max-connections-per-client).",
                retry_after_s=_RETRY_S,
            )
        return None


class Place:
    """One connection among all; `refusal` says why it may not stay, `tell` whether to say so."""

    __slots__ = ("_connections", "client", "refusal", "tell")

    def __init__(
        self, connections: Connections, client: str, refusal: ServerError | None, *, tell: bool
    ) -> None:
        self._connections = connections
        self.client = client
        self.refusal = refusal
        self.tell = tell

    def leave(self) -> None:
        """Give the place back; to be called once."""
        self._connections.leave(self)

    def count(self, reason: str) -> None:
        """Note which limit has ended this connection."""
        self._connections.count(reason)


def client_of(host: str) -> str:
    """Return what counts as one client: an IPv4 address, or the network of an IPv6 address.

    Whoever has one IPv6 address has the whole /64 of it.
    """
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


def _room(wanted: int) -> int:
    """Return how many connections the limit of open files allows, `wanted` at most.

    The limit itself is raised where that is needed and allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    room = max(soft - _OTHER_FILES, soft // 2)
    logger.warning(
        "at most %d connections instead of %d (--max-connections): the process may open %d files",
        *(room, wanted, soft),
    )
    return room
