"""A scripted engine behind the registry of adapters, and a front end whose requests lease them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from starlette.requests import Request

from rbln_backend.lora.adapter_files import Target
from server.errors import InternalError, ModelNotFoundError
from server.frontend import ParsedRequest
from server.lora.folder import ServedModel
from server.lora.registry import AdapterRegistry, EngineAdapter, RegistryLimits, StateFile
from server.request.record import record_of
from server.wire import Endpoint, JsonObject
from tests.server.adapter_folders import TARGETS
from tests.server.scripted import ScriptedEngine, ScriptedFrontend, ScriptedLauncher


@dataclass
class ScriptedPort:
    """An engine with a few slots; it fails the call that `broken` names, and counts what it did."""

    max_loras: int = 2
    read: asyncio.Event = field(default_factory=asyncio.Event)
    unreadable: str = ""
    broken: str = ""
    in_slots: dict[int, int] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.read.set()

    async def targets(self) -> Mapping[str, Target]:
        return TARGETS

    async def stage(self, adapter: EngineAdapter) -> None:
        await self._called("stage")
        self.paths[adapter.id] = adapter.path

    async def staged(self, adapter_id: int) -> tuple[str, str]:
        await asyncio.sleep(0)
        if self.unreadable:
            return "failed", self.unreadable
        return ("ready" if self.read.is_set() else "reading"), ""

    async def add(self, adapter: EngineAdapter) -> None:
        await self._called("add")
        free = set(range(self.max_loras)) - set(self.in_slots.values())
        self.in_slots[adapter.id] = min(free)

    async def remove(self, adapter_id: int) -> None:
        await self._called("remove")
        self.in_slots.pop(adapter_id, None)
        self.paths.pop(adapter_id, None)

    async def slots(self) -> Mapping[int, int]:
        return self.in_slots

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        if self.broken == name:
            raise InternalError(f"{name} does not work")


@dataclass
class AdapterFrontend(ScriptedFrontend):
    """Leases the adapter that a body names as its model, as the real front end does."""

    async def models(self) -> list[JsonObject]:
        ready = self.adapters.ready() if self.adapters is not None else ()
        cards = ({"id": adapter.name, "root": adapter.path} for adapter in ready)
        return [*await super().models(), *cards]

    async def handle(
        self, endpoint: Endpoint, parsed: ParsedRequest, extra_fields: JsonObject, request: Request
    ) -> bytes | AsyncGenerator[str, None]:
        body = parsed.fields
        if body["model"] != "tiny":
            assert self.adapters is not None
            adapter = self.adapters.lease(body["model"])
            if adapter is None:
                raise ModelNotFoundError("no such model", param="model")
            record_of(request.scope).on_end.append(partial(self.adapters.release, adapter))
        return await super().handle(endpoint, parsed, extra_fields, request)


def registry(
    port: ScriptedPort, root: Path | None, state_file: Path | None = None
) -> AdapterRegistry:
    base = ServedModel.of(["tiny"], TARGETS, max_rank=8)
    limits = RegistryLimits(frozenset({"tiny"}), port.max_loras, root)
    file = None if state_file is None else StateFile(state_file)
    return AdapterRegistry(port, base, limits, file)


def launcher(adapters: AdapterRegistry | None) -> ScriptedLauncher:
    made = ScriptedLauncher(engine=ScriptedEngine(AdapterFrontend(adapters=adapters)))
    made.launched.set()
    return made
