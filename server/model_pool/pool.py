"""Loads models within the memory budget, the least recently used ones leaving first.

One task decides, whenever something changes. The model whose oldest request has waited longest is
loaded next, one model at a time. Invariants: the models that are not asleep fit into the budget
together; a pinned model never leaves; a model leaves only when it has no request in flight, and,
unless an operator puts it to sleep, `min_resident_s` after it was ready.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress

from server.errors import EngineFailedError, ModelLoadingError, OverloadedError
from server.model_pool.model_process import ModelProcess, ModelStartError
from server.model_pool.models_file import ModelEntry, ModelsFile
from server.model_pool.pooled_model import ModelState, PooledModel
from server.model_pool.template import TemplateError

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_MAX_RETRY_S = 120
_MAX_BACKOFF_S = 60.0
_STEADY_S = 60.0
"""A process that ran for this long has not failed to start."""
_MEMORY_PERIOD_S = 5.0
_WORK_S = 60.0
"""Seconds for which a model may work on its batches while another one's wait."""
_RESIDENT = (ModelState.READY, ModelState.LEAVING)

StartProcess = Callable[[ModelEntry], Awaitable[ModelProcess]]
BeforeStop = Callable[[PooledModel], Awaitable[None]]


class ModelPool:
    """The models of the file and their processes. Used from the event loop only."""

    def __init__(
        self,
        file: ModelsFile,
        start: StartProcess,
    ) -> None:
        """`start` starts a model's process."""
        self._file = file
        self._start = start
        self.models = {
            entry.name: PooledModel(entry, needed_bytes=entry.stated_bytes or 0)
            for entry in file.models
        }
        self.before_stop: list[BeforeStop] = []
        """Awaited before a model's process is ended."""
        self._changed = asyncio.Event()
        self._work: set[asyncio.Task[None]] = set()
        self._ending = False

    @property
    def budget_bytes(self) -> int:
        """Memory that the models share."""
        return self._file.budget_bytes

    @property
    def held_bytes(self) -> int:
        """Memory of all models that are not asleep."""
        return sum(model.held_bytes for model in self.models.values())

    @asynccontextmanager
    async def lease(
        self, model: PooledModel, max_wait_s: float | None = None
    ) -> AsyncIterator[ModelProcess]:
        """Keep the model loaded during the block, after waiting until it is ready.

        Raises `ModelLoadingError` after at most `max_wait_s` (None: the file's), `OverloadedError`,
        or `EngineFailedError` for a model whose process has failed.
        """
        if model.state is not ModelState.READY:
            await self._wait(model, self._file.max_wait_s if max_wait_s is None else max_wait_s)
        assert model.process is not None
        model.in_flight += 1
        model.used_at = time.monotonic()
        try:
            yield model.process
        finally:
            model.in_flight -= 1
            model.used_at = time.monotonic()
            if not model.in_flight:
                self._changed.set()

    async def wake(self, model: PooledModel, max_wait_s: float) -> None:
        """Load the model and wait until it is ready. Raises as `lease`."""
        if model.state is not ModelState.READY:
            model.kept_awake = True
            try:
                await self._wait(model, max_wait_s)
            except EngineFailedError:
                model.kept_awake = False
                raise

    async def sleep(self, model: PooledModel, max_wait_s: float) -> bool:
        """End the model's process once its requests have ended; return False after `max_wait_s`."""
        model.kept_awake = False
        model.put_to_sleep = model.state in _RESIDENT or model.state is ModelState.LOADING
        self._changed.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(max_wait_s):
                while model.state is not ModelState.ASLEEP:
                    await model.changed.wait()
        return model.state is ModelState.ASLEEP

    def work_on(self, pending: Collection[PooledModel]) -> None:
        """Load one of the models with unfinished stored work, while no request waits.

        It takes the place of models that have had no request and no such work for a while.
        """
        now = time.monotonic()
        asleep = [model for model in pending if model.state is ModelState.ASLEEP]
        if not asleep or any(m.wanted and m.state is not ModelState.READY for m in self._all()):
            return
        next_one = min(asleep, key=lambda m: m.used_at)
        quiet_s = max(self._file.min_resident_s, 1.0)
        free = self.budget_bytes - self.held_bytes
        free += sum(
            model.held_bytes
            for model in self._resident()
            if not model.in_flight
            and now - model.used_at >= (_WORK_S if model in pending else quiet_s)
        )
        if next_one.load_bytes <= free:
            next_one.kept_awake = True
            self._changed.set()

    def _all(self) -> list[PooledModel]:
        return list(self.models.values())

    def eta_s(self, model: PooledModel) -> float:
        """Return the expected seconds until the model is ready."""
        if model.state is ModelState.READY:
            return 0.0
        others = [m for m in self.models.values() if m.state is ModelState.LOADING and m != model]
        before_s = sum(other.remaining_load_s() for other in others)
        retry_s = max(0.0, model.retry_at - time.monotonic())
        return model.remaining_load_s() + max(before_s, retry_s)

    async def run(self) -> None:
        """Load and unload models until cancelled."""
        measuring = asyncio.create_task(self._measure())
        try:
            while True:
                self._changed.clear()
                wait_s = self._step(time.monotonic())
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
        finally:
            measuring.cancel()

    async def close(self) -> None:
        """End all processes."""
        self._ending = True
        for task in list(self._work):
            task.cancel()
        running = [m for m in self.models.values() if m.process is not None]
        await asyncio.gather(*(self._end_process(model) for model in running))

    async def _wait(self, model: PooledModel, max_wait_s: float) -> None:
        """Wait until the model is ready."""
        if model.waiting >= self._file.max_waiting:
            raise OverloadedError(
                f"{model.waiting} requests wait for the model {model.name!r} to be loaded, the "
                "limit (max_waiting).",
                retry_after_s=self._retry_after_s(model),
            )
        model.waiting += 1
        if model.wanted_since is None:
            model.wanted_since = time.monotonic()
        self._changed.set()
        try:
            async with asyncio.timeout(max_wait_s):
                while model.state is not ModelState.READY:
                    self._refuse_failed(model)
                    await model.changed.wait()
        except TimeoutError:
            raise ModelLoadingError(
                f"The model {model.name!r} is being loaded: {self.story(model)}. "
                "GET /startupz has the progress.",
                retry_after_s=self._retry_after_s(model),
            ) from None
        finally:
            model.waiting -= 1
            if not model.wanted:
                model.wanted_since = None
                self._changed.set()

    def story(self, model: PooledModel) -> str:
        """Return the progress of a load in words."""
        status = {} if model.process is None else model.process.status
        phase = status.get("phase", model.state.value)
        graphs = status.get("graphs") or {}
        done = f", {graphs['done']} of {graphs['total']} graphs" if graphs.get("total") else ""
        return f"phase {phase}{done}, about {self.eta_s(model):.0f} s left"

    def _refuse_failed(self, model: PooledModel) -> None:
        """Raise `EngineFailedError` while a failed model is not started again."""
        wait_s = model.retry_at - time.monotonic()
        if model.state is ModelState.ASLEEP and model.reason is not None and wait_s > 0:
            raise EngineFailedError(
                f"The model {model.name!r} has failed: {model.reason}", retry_after_s=wait_s
            )

    def _retry_after_s(self, model: PooledModel) -> int:
        return min(max(1, round(self.eta_s(model))), _MAX_RETRY_S)

    def _step(self, now: float) -> float | None:
        """Start what is due; return the seconds until the next look, None for the next change."""
        for model in self.models.values():
            if model.put_to_sleep and model.state in _RESIDENT:
                self._leave(model)
        states = {model.state for model in self.models.values()}
        if self._ending or ModelState.LOADING in states or ModelState.STOPPING in states:
            return None
        wanted = [m for m in self.models.values() if m.wanted and m.state is ModelState.ASLEEP]
        due = [model for model in wanted if model.retry_at <= now]
        if not due:
            if (over := self.held_bytes - self.budget_bytes) > 0 and self._several_may_leave():
                return self._make_space(over, now)
            self._keep_leaving(())
            return min((model.retry_at - now for model in wanted), default=None)
        next_one = min(due, key=_turn)
        missing = self.held_bytes + next_one.load_bytes - self.budget_bytes
        if missing <= 0 or not self._resident():
            self._keep_leaving(())
            self._begin(next_one)
            return None
        return self._make_space(missing, now)

    def _resident(self) -> list[PooledModel]:
        """Return the loaded models that may leave."""
        models = self.models.values()
        return [m for m in models if m.state in _RESIDENT and not m.entry.pinned]

    def _several_may_leave(self) -> bool:
        # One that alone needs more than its estimate would be loaded again and again.
        return len(self._resident()) > 1

    def _make_space(self, missing: int, now: float) -> float | None:
        """Let the least recently used models leave; return the seconds until more of them may."""
        stays_s = self._file.min_resident_s
        resident = self._resident()
        resident.sort(key=lambda m: (m.in_flight > 0, m.used_at))
        leaving: list[PooledModel] = []
        for model in resident:
            if missing > 0 and model.ready_since + stays_s <= now:
                leaving.append(model)
                missing -= model.held_bytes
        if missing > 0:
            self._keep_leaving(())
            times = (model.ready_since + stays_s - now for model in resident)
            return min((seconds for seconds in times if seconds > 0), default=None)
        self._keep_leaving(leaving)
        for model in leaving:
            self._leave(model)
        return None

    def _keep_leaving(self, leaving: list[PooledModel] | tuple[()]) -> None:
        """Return models to their requests, unless they are in `leaving` or put to sleep."""
        for model in self.models.values():
            if (
                model.state is ModelState.LEAVING
                and model not in leaving
                and not model.put_to_sleep
            ):
                model.state = ModelState.READY
                model.notify()

    def _leave(self, model: PooledModel) -> None:
        """Admit no request, and end the process once none is in flight."""
        model.state = ModelState.LEAVING
        if not model.in_flight:
            model.state = ModelState.STOPPING
            self._spawn(self._stop(model))

    def _begin(self, model: PooledModel) -> None:
        model.state = ModelState.LOADING
        model.notify()
        self._spawn(self._load(model))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _load(self, model: PooledModel) -> None:
        """Start the model's process and wait until it is ready."""
        began = time.monotonic()
        logger.info(
            "loading the model %s: %d of %d MiB are held, it needs about %d MiB",
            *(model.name, (self.held_bytes - model.held_bytes) // _MIB),
            *(self.budget_bytes // _MIB, model.needed_bytes // _MIB),
        )
        try:
            model.process = await self._start(model.entry)
            await model.process.until_ready()
        except (ModelStartError, TemplateError) as error:
            self._note_end(model, str(error))
            return
        model.load_s = time.monotonic() - began
        model.measured_bytes = await model.process.memory_bytes()
        model.loads += 1
        model.kept_awake = False
        model.wanted_since = None
        model.ready_since = model.used_at = time.monotonic()
        model.state, model.reason = ModelState.READY, None
        logger.info(
            "loaded the model %s after %.1f s: %d MiB",
            *(model.name, model.load_s, model.measured_bytes // _MIB),
        )
        model.notify()
        self._changed.set()
        self._spawn(self._watch(model, model.process))

    async def _watch(self, model: PooledModel, process: ModelProcess) -> None:
        """Note the end of a process that ends by itself."""
        status = await process.ended()
        if model.process is process and model.state in _RESIDENT:
            self._note_end(model, f"its process ended with status {status}")

    def _note_end(self, model: PooledModel, reason: str) -> None:
        """Return a model whose process has ended by itself to sleep; it starts again later."""
        now = time.monotonic()
        steady = model.state in _RESIDENT and now - model.ready_since > _STEADY_S
        model.failures = 1 if steady else model.failures + 1
        model.retry_at = now + min(2.0 ** (model.failures - 1), _MAX_BACKOFF_S)
        model.reason = reason
        logger.error("the model %s has failed: %s", model.name, reason)
        model.kept_awake = False
        if model.process is not None:
            self._spawn(model.process.client.aclose())
        self._fall_asleep(model)

    async def _stop(self, model: PooledModel) -> None:
        began = time.monotonic()
        await self._end_process(model)
        logger.info("unloaded the model %s in %.1f s", model.name, time.monotonic() - began)

    async def _end_process(self, model: PooledModel) -> None:
        process = model.process
        assert process is not None
        if process.running and model.state is not ModelState.LOADING:
            for call in self.before_stop:
                await call(model)
        await process.stop()
        self._fall_asleep(model)

    def _fall_asleep(self, model: PooledModel) -> None:
        model.process = None
        model.put_to_sleep = False
        model.state = ModelState.ASLEEP
        model.notify()
        self._changed.set()

    async def _measure(self) -> None:
        """Measure the memory of loaded models now and then."""
        while True:
            await asyncio.sleep(_MEMORY_PERIOD_S)
            for model in self.models.values():
                if model.state in _RESIDENT and model.process is not None:
                    model.measured_bytes = await model.process.memory_bytes()


def _turn(model: PooledModel) -> tuple[bool, float]:
    """Return the place in the order of loads: pinned models, then by the time of the wait."""
    since = model.wanted_since
    return (not model.entry.pinned, float("inf") if since is None else since)
