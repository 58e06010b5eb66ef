"""Registry of LoRA adapters: their names, slots and running requests.

Invariants: a name belongs to at most one ready adapter. Ids are never reused. An adapter is removed
from the engine only after the last request that leases it. At most `max_loras` adapters hold a
slot. The file with the adapters that were loaded over HTTP is read after a restart; after a crash
or power cut it holds the complete old or new list. Used from the event loop only.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import json
import logging
import os
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from rbln_backend.api.names import Target
from rbln_backend.host.files import replace_file, sync_directory
from server.errors import (
    AdapterExistsError,
    InternalError,
    NoAdapterSlotError,
    NotFoundError,
    ServerError,
    UnsupportedOperationError,
    describe,
    invalid_value,
)
from server.host.files import read_regular
from server.host.tasks import in_thread
from server.lora.folder import ServedModel, check_fit, read_folder, refusal


class State(enum.StrEnum):
    """Life cycle of an adapter; the value is sent to clients."""

    LOADING = "loading"
    """It is being checked, read and copied into a slot; requests cannot name it yet."""
    READY = "ready"
    DRAINING = "draining"
    """New requests cannot name it; its slot is freed after the last running request."""
    FAILED = "failed"
    """It could not be loaded at start, or the engine could not drop it; `error` says why."""


class AdapterObject(TypedDict):
    object: Literal["lora_adapter"]
    name: str
    state: State
    slot: int | None
    rank: int | None
    in_flight: int
    path: str
    lora_int_id: int
    loaded_at: float | None
    static: bool
    error: str | None


@dataclass(eq=False, slots=True)
class Adapter:
    """One load of an adapter; loading a name again makes another one with another `id`.

    `source` is the path as the request wrote it, `path` the resolved one after the check.
    `loaded_at` is Unix time in seconds. `base` is the base model that the operator named, or None.
    """

    name: str
    id: int
    source: str
    static: bool = False
    base: str | None = None
    state: State = State.LOADING
    path: str = ""
    rank: int | None = None
    slot: int | None = None
    in_flight: int = 0
    loaded_at: float | None = None
    error: str | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the engine has dropped it or failed to drop it."""

    def to_dict(self) -> AdapterObject:
        return {
            "object": "lora_adapter",
            "name": self.name,
            "state": self.state,
            "slot": self.slot,
            "rank": self.rank,
            "in_flight": self.in_flight,
            "path": self.path or self.source,
            "lora_int_id": self.id,
            "loaded_at": self.loaded_at,
            "static": self.static,
            "error": self.error,
        }


class AdapterPort(Protocol):
    """Engine operations that the registry uses. Every failure is a `ServerError`."""

    async def targets(self) -> Mapping[str, Target]:
        """Return the adaptable layers by module path."""

    async def stage(self, adapter: Adapter) -> None:
        """Start to read an adapter in the background."""

    async def staged(self, adapter_id: int) -> tuple[str, str]:
        """Return ("reading", ""), ("ready", "") or ("failed", the reason)."""

    async def add(self, adapter: Adapter) -> None:
        """Copy a staged adapter into a free slot, between two steps."""

    async def remove(self, adapter_id: int) -> None:
        """Drop an adapter that no request uses, staged or in a slot; ignores unknown ids."""

    async def slots(self) -> Mapping[int, int]:
        """Return the slot of each adapter by its id."""


logger = logging.getLogger(__name__)

STATE_FILE = "adapters.json"
"""Name of the file in --lora-root."""
VERSION = 1
_MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Remembered:
    """Name of an adapter, and its path as the request wrote it."""

    name: str
    path: str


_LIST = TypeAdapter(list[Remembered])


class StateFile:
    """The list of adapters in a file. Its methods block: call them in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def writable(self) -> bool:
        """Return whether the file can be written, without changing it."""
        folder = self.path.parent
        if self.path.exists() and not (self.path.is_file() and os.access(self.path, os.W_OK)):
            return False
        # A new list is written beside the old one.
        return folder.is_dir() and os.access(folder, os.W_OK)

    def read(self) -> list[Remembered]:
        """Return the stored adapters; a damaged file is renamed, and the result is empty."""
        try:
            content = json.loads(read_regular(self.path, _MAX_BYTES))
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']!r} is not {VERSION}")
            return _LIST.validate_python(content["adapters"])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError) as error:
            aside = self.path.with_name(f"{self.path.name}.damaged")
            logger.error("%s cannot be read (%s); kept as %s", self.path, error, aside.name)
            try:
                self.path.replace(aside)
            except OSError as failure:
                logger.error("%s cannot be renamed: %s", self.path, failure)
            return []

    def write(self, adapters: Sequence[Remembered]) -> None:
        """Replace the list. Raises `OSError`."""
        content = {"version": VERSION, "adapters": [asdict(adapter) for adapter in adapters]}
        replace_file(self.path, json.dumps(content, indent=1).encode())
        sync_directory(self.path.parent)


MAX_NAME_CHARS = 256
_NAME = "lora_name"
_STAGE_TIMEOUT_S = 300.0
_FIRST_POLL_S = 0.01
_SLOWEST_POLL_S = 0.2


class AdapterRegistry:
    """All LoRA adapters of the service."""

    def __init__(
        self,
        port: AdapterPort,
        base: ServedModel,
        *,
        reserved_names: frozenset[str],
        max_loras: int,
        root: Path | None,
        state_file: StateFile | None,
    ) -> None:
        """`reserved_names` are those that adapters cannot have, `max_loras` the number of slots.

        Without a `root` of adapter folders, adapters cannot be loaded over HTTP.
        """
        self.base = base
        self.reserved_names = reserved_names
        self.max_loras = max_loras
        self._root = root
        self._port = port
        self._state_file = state_file
        self._ids = itertools.count(1)
        self._named: dict[str, Adapter] = {}
        self._loading: dict[str, tuple[Adapter, asyncio.Task[None]]] = {}
        self._leaving: list[Adapter] = []
        self._in_slots: set[Adapter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()

    def lease(self, name: str) -> Adapter | None:
        """Return the ready adapter of that name for a request; `release` ends the lease."""
        adapter = self._named.get(name)
        if adapter is None or adapter.state is not State.READY:
            return None
        adapter.in_flight += 1
        return adapter

    def release(self, adapter: Adapter) -> None:
        """End a lease; the last lease of a draining adapter frees its slot."""
        adapter.in_flight -= 1
        if not adapter.in_flight and adapter.state is State.DRAINING:
            self._start(self._drop(adapter))

    def ready(self) -> Iterator[Adapter]:
        """Return the adapters that requests can name."""
        return (a for a in self._named.values() if a.state is State.READY)

    def all(self) -> list[Adapter]:
        """Return all adapters, including loading and draining ones."""
        loading = [adapter for adapter, _ in self._loading.values()]
        return [*self._named.values(), *loading, *self._leaving]

    def get(self, name: str) -> Adapter:
        """Return the adapter of a name, or its last one if it drains. Raises `NotFoundError`."""
        found = next((adapter for adapter in self.all() if adapter.name == name), None)
        if found is None:
            raise _not_found(name)
        return found

    async def load(self, name: str, path: str, *, replace: bool = False) -> Adapter:
        """Load the adapter at `path`, below the root, as `name`, and return it once it is ready.

        With `replace` it takes over a name in use; running requests keep the old adapter.
        Cancelling the call does not stop the load. Raises `RequestError` if the request is wrong,
        another `ServerError` for other failures.
        """
        if self._root is None:
            raise UnsupportedOperationError(
                "Adapters can be loaded over HTTP only below a directory that the server was "
                "started with: --lora-root."
            )
        adapter = Adapter(name, next(self._ids), path)
        self._check_name(name, replace=replace)

        async def load_and_remember() -> None:
            await self._load(adapter)
            await self._remember()

        await self._begin(adapter, load_and_remember())
        return adapter

    async def load_static(self, name: str, path: str, base: str | None) -> None:
        """Load an adapter of the command line, from any folder. Raises `ServerError`."""
        adapter = Adapter(name, next(self._ids), path, static=True, base=base)
        self._check_name(name, replace=False)
        await self._begin(adapter, self._load(adapter))

    async def restore(self) -> None:
        """Load the adapters of before a restart; failures are listed as failed adapters."""
        if self._state_file is None:
            return
        for entry in await in_thread(self._state_file.read):
            adapter = Adapter(entry.name, next(self._ids), entry.path)
            try:
                self._check_name(entry.name, replace=False)
                await self._begin(adapter, self._load(adapter))
            except ServerError as error:
                logger.error("adapter %r could not be loaded again: %s", entry.name, error)
                adapter.state, adapter.error = State.FAILED, error.message
                self._named.setdefault(entry.name, adapter)

    async def unload(self, name: str, *, wait: bool) -> Adapter:
        """Remove a name and return its adapter; with `wait`, once the engine has dropped it.

        Waits for the end of a load first. Raises `NotFoundError`, and `InternalError` if the engine
        cannot drop it.
        """
        while (loading := self._loading.get(name)) is not None:
            await asyncio.wait({loading[1]})
        adapter = self._named.pop(name, None)
        if adapter is not None:
            self._leave(adapter)
            await self._remember()
        else:
            adapter = next((gone for gone in self._leaving if gone.name == name), None)
            if adapter is None:
                raise _not_found(name)
            if adapter.state is State.FAILED:
                # The engine could not drop it; try again.
                adapter.state, adapter.error = State.DRAINING, None
                adapter.gone.clear()
                self._start(self._drop(adapter))
        if wait or not adapter.in_flight:
            await adapter.gone.wait()
            if adapter in self._leaving:
                raise InternalError(f"The engine could not drop the adapter: {adapter.error}")
        return adapter

    def _check_name(self, name: str, *, replace: bool) -> None:
        if not name or len(name) > MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
            must = f"have 1 to {MAX_NAME_CHARS} printable characters and no space around them"
            raise invalid_value(_NAME, must, name)
        if name in self.reserved_names:
            message = f"{describe(name)} is the name of the served model itself."
            raise AdapterExistsError(message, param=_NAME)
        if name in self._loading:
            raise AdapterExistsError(f"An adapter {describe(name)} is being loaded.", param=_NAME)
        present = self._named.get(name)
        if present is not None and present.state is State.READY and not replace:
            message = f"An adapter {describe(name)} is loaded; 'load_inplace' replaces it."
            raise AdapterExistsError(message, param=_NAME)

    async def _begin(self, adapter: Adapter, work: Coroutine[Any, Any, None]) -> None:
        """Load in a separate task, so that a cancelled request does not leak a slot."""
        task = self._start(work)
        self._loading[adapter.name] = (adapter, task)
        await asyncio.shield(task)

    async def _load(self, adapter: Adapter) -> None:
        started = time.perf_counter()
        try:
            adapter.path, adapter.rank = await in_thread(partial(self._checked, adapter))
            if len(self._in_slots) >= self.max_loras:
                raise NoAdapterSlotError(
                    f"All {self.max_loras} slots for adapters are taken (--max-loras); unload one "
                    "first. 'load_inplace' needs a free slot as well, until the old one has ended."
                )
            self._in_slots.add(adapter)
            try:
                await self._port.stage(adapter)
                await self._until_staged(adapter)
                await self._port.add(adapter)
                adapter.slot = (await self._port.slots()).get(adapter.id)
            except BaseException:
                await self._give_up(adapter)
                raise
        finally:
            del self._loading[adapter.name]
        before = self._named.pop(adapter.name, None)
        adapter.state, adapter.loaded_at = State.READY, time.time()
        self._named[adapter.name] = adapter
        if before is not None:
            self._leave(before)
        logger.info(
            "adapter %r of rank %d is in slot %s after %.2f s, from %s",
            adapter.name,
            adapter.rank,
            adapter.slot,
            time.perf_counter() - started,
            adapter.path,
        )

    def _checked(self, adapter: Adapter) -> tuple[str, int]:
        """Return the resolved path of an adapter and its rank. Blocks."""
        folder = read_folder(adapter.source, None if adapter.static else self._root)
        rank = check_fit(folder, self.base, any_base=adapter.base is not None)
        return str(folder.path), rank

    async def _until_staged(self, adapter: Adapter) -> None:
        deadline = time.monotonic() + _STAGE_TIMEOUT_S
        pause = _FIRST_POLL_S
        while time.monotonic() < deadline:
            state, message = await self._port.staged(adapter.id)
            if state == "failed":
                # Clients see the path that they sent, not the resolved one.
                raise refusal(message.rstrip(".").replace(adapter.path, adapter.source))
            if state == "ready":
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _SLOWEST_POLL_S)
        raise InternalError(f"The adapter was not read within {_STAGE_TIMEOUT_S:.0f} s.")

    async def _give_up(self, adapter: Adapter) -> None:
        try:
            await self._port.remove(adapter.id)
        except ServerError as error:
            self._stuck(adapter, error)
        else:
            self._in_slots.discard(adapter)

    def _leave(self, adapter: Adapter) -> None:
        if adapter.state is State.FAILED:
            # It was never in a slot.
            adapter.gone.set()
            return
        adapter.state = State.DRAINING
        self._leaving.append(adapter)
        if not adapter.in_flight:
            self._start(self._drop(adapter))

    async def _drop(self, adapter: Adapter) -> None:
        try:
            await self._port.remove(adapter.id)
        except ServerError as error:
            self._leaving.remove(adapter)
            self._stuck(adapter, error)
        else:
            logger.info("adapter %r was removed from slot %s", adapter.name, adapter.slot)
            self._in_slots.discard(adapter)
            self._leaving.remove(adapter)
        finally:
            adapter.gone.set()

    def _stuck(self, adapter: Adapter, error: ServerError) -> None:
        """List an adapter that the engine did not drop; it holds a slot until it is unloaded."""
        logger.error("the engine could not drop the adapter %r: %s", adapter.name, error)
        adapter.state, adapter.error = State.FAILED, error.message
        self._leaving.append(adapter)
        adapter.gone.set()

    async def _remember(self) -> None:
        if self._state_file is None:
            return
        async with self._writing:
            kept = [a for a in self._named.values() if not a.static]
            entries = [Remembered(adapter.name, adapter.source) for adapter in kept]
            try:
                await in_thread(partial(self._state_file.write, entries))
            except OSError as error:
                path = self._state_file.path
                logger.error("%s is out of date, it cannot be written: %s", path, error)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        # The event loop itself keeps only a weak reference.
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Mark the exception as retrieved; a waiting request gets it as well.
            task.exception()


def _not_found(name: str) -> NotFoundError:
    return NotFoundError(f"There is no adapter {describe(name)}.", param=_NAME)
