"""Both event loops: the server runs on uvloop, and its other tests on asyncio's own."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every test of this folder on each."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave asyncio's own loop to the wide run: no server has it."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "asyncio" in item.name.partition("[")[2].split("-")[0]:
            item.add_marker(pytest.mark.wide)
