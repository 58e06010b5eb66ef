"""Both event loops: the server runs on uvloop, and its other tests on asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every test of this folder on each."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
