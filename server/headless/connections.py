"""Detects that the front end of another host has gone, by the connections of an engine process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import psutil

_LOST_AFTER = 4


class Address(NamedTuple):
    """Host and port of the other end of a TCP connection."""

    ip: str
    port: int


def remote_ends(pids: Iterable[int], *, without: int | None) -> frozenset[Address]:
    """Return the remote ends of the processes' established TCP connections to other processes.

    Processes that have ended have none; ends at port `without` do not count.
    """
    ends: set[Address] = set()
    own = {without}
    for pid in pids:
        try:
            connections = psutil.Process(pid).net_connections("tcp")
        except psutil.Error:
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                own.add(connection.laddr.port)
            elif connection.status == psutil.CONN_ESTABLISHED:
                ends.add(Address(*connection.raddr))
    # Ranks of one host are connected to each other: those ends are ports of these processes.
    return frozenset(end for end in ends if end.port not in own)


class FrontWatch:
    """Compares the engines' connections with all that they ever had.

    ZeroMQ connects again for ever to a front end that has gone, without an error, and a front end
    that starts again has other ports. A connection counts as lost if it is absent several times in
    a row.
    """

    def __init__(self, ends: Callable[[], Collection[Address]]) -> None:
        self._ends = ends
        self._seen = set(ends())
        self._absent = 0

    def lost(self) -> Address | None:
        """Return an end that was connected and no longer is; call it a few times a second."""
        ends = set(self._ends())
        self._seen |= ends
        gone = self._seen - ends
        self._absent = self._absent + 1 if gone else 0
        return min(gone) if self._absent >= _LOST_AFTER else None
