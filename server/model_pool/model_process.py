"""One model's server process: its start, its progress, its memory and its end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from server.host.tasks import in_thread
from server.model_pool.template import ForkedCommand

_POLL_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_KILL_AFTER_S = 15.0
"""Seconds beyond --drain-timeout-s after which a process that should end is killed."""
_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30)


class ModelProcess:
    """A running `rbln-serve serve` on a Unix socket. Used from the event loop only."""

    def __init__(self, command: ForkedCommand, address: Path, drain_s: float) -> None:
        self._command = command
        self._drain_s = drain_s
        self.started = time.monotonic()
        self.client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(address), limits=_NO_LIMITS),
            base_url="http://model",
            timeout=None,
            trust_env=False,
        )
        self.status: Mapping[str, Any] = {}
        """The last answer of /startupz; empty until the process listens."""

    @property
    def pid(self) -> int:
        """The process id."""
        return self._command.pid

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self._command.running

    @property
    def eta_s(self) -> float | None:
        """Seconds until the model is ready, None if unknown."""
        eta_s = self.status.get("eta_s")
        return None if eta_s is None else float(eta_s)

    async def ended(self) -> int:
        """Wait for the end of the process and return its exit status."""
        return await asyncio.shield(self._command.ended)

    async def until_ready(self) -> None:
        """Follow the start. Raises `ModelStartError` when the process ends first."""
        while self.running:
            with suppress(httpx.HTTPError, ValueError):
                answer = await self.client.get("/startupz", timeout=_PROBE_TIMEOUT_S)
                self.status = answer.json()
                if answer.status_code == 200:
                    return
            await asyncio.sleep(_POLL_S)
        reason = self.status.get("reason") or "the log has the reason"
        raise ModelStartError(f"its process ended with status {await self.ended()}: {reason}")

    async def stop(self) -> None:
        """End the process: drain it, and kill it if that takes too long."""
        self._command.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._drain_s + _KILL_AFTER_S):
                await self.ended()
        except TimeoutError:
            await self.kill()
        await self.client.aclose()

    async def kill(self) -> None:
        """End the process at once; its engine ends with it."""
        self._command.send_signal(signal.SIGKILL)
        await self.ended()

    async def memory_bytes(self) -> int:
        """Return the proportional set size of the process and all its descendants."""
        return await in_thread(lambda: memory_of_tree(self.pid))


class ModelStartError(Exception):
    """The process of a model ended before it was ready."""


def memory_of_tree(pid: int) -> int:
    """Return the bytes of a process and its descendants; shared pages count by their share."""
    return _memory_of(pid) + sum(memory_of_tree(child) for child in _children(pid))


def _memory_of(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        # It has ended.
        return 0
    lines = (line.split() for line in text.splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "Pss:"), 0)


def _children(pid: int) -> list[int]:
    # A process may be started by any thread of its parent.
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text(encoding="ascii").split())
    return found
