"""The calls of nixl 1.5 that vLLM's pull connector makes, between agents of one process.

``make test-nixl`` runs the same tests with the real package, which this file imitates in what vLLM
observes: descriptor lists, transfers by index, notifications, states and measurements.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._bindings import nixlXferTelemetry  # noqa: TID252 - mypy does not know the folder as a root

_AGENTS: dict[str, nixl_agent] = {}


def nixl_agent_config(**options: Any) -> dict[str, Any]:
    return options


@dataclass
class _Transfer:
    parts: list[tuple[int, int, int]]
    """Local address, remote address, bytes."""
    peer: str
    notification: bytes
    state: str = "PROC"


class nixl_agent:  # noqa: N801 - the package's name
    """Memory of one engine, and what it reads from others."""

    def __init__(self, name: str, config: Any = None) -> None:
        self.name = name
        self._lists: dict[int, tuple[str, np.ndarray]] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._notifications: dict[str, list[bytes]] = {}
        self._handles = 0
        self.is_dead = False
        _AGENTS[name] = self

    def get_reg_descs(self, ranges: Sequence[tuple[int, int, int, str]], memory: str) -> Any:
        assert memory == "DRAM"
        return list(ranges)

    def register_memory(self, ranges: Any, backends: Sequence[str]) -> None:
        assert list(backends) == ["UCX"]

    def deregister_memory(self, ranges: Any) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None: ...

    def get_xfer_descs(self, blocks: np.ndarray, memory: str) -> np.ndarray:
        assert memory == "DRAM"
        return np.asarray(blocks)

    def prep_xfer_dlist(self, agent: str, blocks: np.ndarray) -> int:
        return self._keep(self._lists, (agent, blocks))

    def release_dlist_handle(self, handle: int) -> None:
        del self._lists[handle]

    def make_prepped_xfer(
        self,
        operation: str,
        local: int,
        local_indices: Sequence[int],
        remote: int,
        remote_indices: Sequence[int],
        notif_msg: bytes = b"",
    ) -> int:
        assert operation == "READ"
        (_, own), (peer, theirs) = self._lists[local], self._lists[remote]
        parts = []
        for mine, other in zip(own[local_indices], theirs[remote_indices], strict=True):
            assert mine[1] == other[1], "descriptors of different lengths"
            parts.append((int(mine[0]), int(other[0]), int(mine[1])))
        return self._keep(self._transfers, _Transfer(parts, peer, notif_msg))

    def transfer(self, handle: int) -> str:
        transfer = self._transfers[handle]
        if _AGENTS[transfer.peer].is_dead:
            transfer.state = "ERR"
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        """Copy when asked for the second time, so that steps run while blocks are read."""
        transfer = self._transfers[handle]
        if transfer.state == "PROC":
            transfer.state = "HALF"
            return "PROC"
        if transfer.state == "HALF":
            for mine, other, length in transfer.parts:
                ctypes.memmove(mine, other, length)
            transfer.state = "DONE"
            self.send_notif(transfer.peer, transfer.notification)
        return transfer.state

    def get_xfer_telemetry(self, handle: int) -> nixlXferTelemetry:
        parts = self._transfers[handle].parts
        return nixlXferTelemetry(sum(length for _, _, length in parts), len(parts))

    def release_xfer_handle(self, handle: int) -> None:
        del self._transfers[handle]

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        _AGENTS[agent]._notifications.setdefault(self.name, []).append(notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        taken, self._notifications = self._notifications, {}
        return taken

    def _keep(self, kept: dict[int, Any], value: Any) -> int:
        self._handles += 1
        kept[self._handles] = value
        return self._handles
