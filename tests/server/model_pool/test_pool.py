"""Which model is loaded next and which one leaves, with processes that are events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from server.errors import EngineFailedError, ModelLoadingError, OverloadedError
from server.model_pool.model_process import ModelStartError
from server.model_pool.models_file import ModelsFile
from server.model_pool.pool import ModelPool
from server.model_pool.pooled_model import ModelState

GIB = 1 << 30


class ScriptedProcess:
    """A model's process that is ready at once, unless `fails`."""

    def __init__(self, name: str, log: list[str], fails: bool) -> None:
        self.name, self.log, self.fails = name, log, fails
        self.status: Mapping[str, Any] = {}
        self.eta_s = None
        self.started = 0.0
        self.end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.client = self

    @property
    def running(self) -> bool:
        return not self.end.done()

    async def until_ready(self) -> None:
        if self.fails:
            raise ModelStartError("no memory")
        self.log.append(f"+{self.name}")

    async def ended(self) -> int:
        return await asyncio.shield(self.end)

    async def stop(self) -> None:
        self.log.append(f"-{self.name}")
        if not self.end.done():
            self.end.set_result(0)

    async def aclose(self) -> None:
        pass

    async def memory_bytes(self) -> int:
        return GIB


@asynccontextmanager
async def _pool(
    log: list[str], fails: tuple[str, ...] = (), pinned: str = "", **limits: Any
) -> AsyncIterator[ModelPool]:
    """A pool of a, b and c, of which two fit."""
    entries = [{"name": n, "path": "/m", "memory_gib": 1, "pinned": n == pinned} for n in "abc"]
    content = {"memory_gib": 2, "min_resident_s": 0, "max_wait_s": 5, "models": entries} | limits

    async def start(entry: Any) -> Any:
        return ScriptedProcess(entry.name, log, entry.name in fails)

    pool = ModelPool(ModelsFile.model_validate(content), start)
    task = asyncio.create_task(pool.run())
    try:
        yield pool
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _use(pool: ModelPool, name: str) -> None:
    async with pool.lease(pool.models[name]) as process:
        assert process.name == name  # type: ignore[attr-defined]


async def test_the_least_recently_used_model_leaves() -> None:
    log: list[str] = []
    async with _pool(log) as pool:
        for name in "abacab":
            await _use(pool, name)
    # b leaves for c, then c (used before a) leaves for b.
    assert log == ["+a", "+b", "-b", "+c", "-c", "+b"]


async def test_a_pinned_model_is_loaded_at_once_and_never_leaves() -> None:
    log: list[str] = []
    async with _pool(log, pinned="a") as pool:
        for name in "bcbc":
            await _use(pool, name)
    assert log == ["+a", "+b", "-b", "+c", "-c", "+b", "-b", "+c"]


async def test_running_requests_hold_a_model_and_new_ones_wait() -> None:
    log: list[str] = []
    async with _pool(log) as pool:
        await _use(pool, "b")
        async with pool.lease(pool.models["a"]), pool.lease(pool.models["b"]):
            waiting = asyncio.create_task(_use(pool, "c"))
            await asyncio.sleep(0.05)
            assert log == ["+b", "+a"]
            states = {name: model.state for name, model in pool.models.items()}
            assert states["b"] is ModelState.LEAVING or states["a"] is ModelState.LEAVING
        await waiting
        assert log[2:] in (["-a", "+c"], ["-b", "+c"])


async def test_a_model_stays_for_its_least_time() -> None:
    log: list[str] = []
    async with _pool(log, min_resident_s=0.3) as pool:
        await _use(pool, "a")
        await _use(pool, "b")
        began = asyncio.get_running_loop().time()
        await _use(pool, "c")
        assert asyncio.get_running_loop().time() - began >= 0.2
    assert log == ["+a", "+b", "-a", "+c"]


async def test_waits_are_bounded_in_time_and_number() -> None:
    log: list[str] = []
    async with (
        _pool(log, max_wait_s=0.1, max_waiting=1) as pool,
        pool.lease(pool.models["a"]),
        pool.lease(pool.models["b"]),
    ):
        first = asyncio.create_task(_use(pool, "c"))
        await asyncio.sleep(0.02)
        with pytest.raises(OverloadedError, match="max_waiting"):
            await _use(pool, "c")
        with pytest.raises(ModelLoadingError) as caught:
            await first
        assert int(caught.value.headers["retry-after"]) >= 1
        await asyncio.sleep(0.02)
        # Nothing waits any more, so both models are open to their requests again.
        assert {pool.models[n].state for n in "ab"} == {ModelState.READY}


async def test_a_model_that_fails_is_refused_until_it_is_tried_again() -> None:
    log: list[str] = []
    async with _pool(log, fails=("a",)) as pool:
        with pytest.raises(EngineFailedError, match="no memory") as caught:
            await _use(pool, "a")
        assert caught.value.headers["retry-after"] == "1"
        await _use(pool, "b")


async def test_stored_work_is_loaded_while_no_request_waits() -> None:
    log: list[str] = []
    async with _pool(log) as pool:
        await _use(pool, "a")
        pool.work_on([pool.models["c"]])
        await asyncio.sleep(0.05)
        await _use(pool, "b")
        # a and c would have to leave too early.
        pool.work_on([pool.models["a"]])
        await asyncio.sleep(0.05)
    assert log == ["+a", "+c", "-a", "+b"]
