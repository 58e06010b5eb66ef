"""The registry of LoRA adapters over vLLM's engine, and its mapping for vLLM's serving classes.

A request finds only the adapter that it holds a lease of: between its lease and vLLM's lookup the
name may be removed or reused by another load.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from server.errors import ServerError
from server.frontend import LaunchError
from server.host.tasks import in_thread
from server.lora.folder import ServedModel
from server.lora.registry import (
    STATE_FILE,
    Adapter,
    AdapterRegistry,
    EngineAdapter,
    RegistryLimits,
    StateFile,
    Target,
)
from server.request.record import RequestRecord
from server.settings import ServerSettings
from server.vllm.errors import RequestContext, from_exception
from server.vllm.patches import use_lora_requests

logger = logging.getLogger(__name__)

_leased: ContextVar[Adapter | None] = ContextVar("leased", default=None)
"""The adapter that the current request holds a lease of."""


def lease(adapters: AdapterRegistry, name: str, record: RequestRecord) -> bool:
    """Lease an adapter to a request until it ends; return False if none is ready."""
    adapter = adapters.lease(name)
    if adapter is None:
        return False
    record.on_end.append(partial(adapters.release, adapter))
    _leased.set(adapter)
    return True


class EngineAdapters:
    """`server.lora.registry.AdapterPort` over the engine and its workers."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    async def targets(self) -> Mapping[str, Target]:
        """Return the layers that adapters may change; all workers have the same."""
        targets = await self._workers("lora_targets")
        return {name: Target.from_lists(*target) for name, target in targets[0].items()}

    async def stage(self, adapter: EngineAdapter) -> None:
        await self._workers("stage_lora", _request(adapter))

    async def staged(self, adapter_id: int) -> tuple[str, str]:
        """Return the state of the slowest worker, and its message."""
        states = [tuple(state) for state in await self._workers("staged_lora", adapter_id)]
        for stage in ("failed", "reading"):
            for state, message in states:
                if state == stage:
                    return state, message
        return "ready", ""

    async def add(self, adapter: EngineAdapter) -> None:
        await self._call(self._engine.add_lora(_request(adapter)))

    async def remove(self, adapter_id: int) -> None:
        await self._call(self._engine.remove_lora(adapter_id))

    async def slots(self) -> Mapping[int, int]:
        return {int(k): int(v) for k, v in (await self._workers("lora_slots"))[0].items()}

    async def _workers(self, method: str, *arguments: Any) -> list[Any]:
        results: list[Any] = await self._call(self._engine.collective_rpc(method, args=arguments))
        return results

    async def _call(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except Exception as error:
            # The boundary to the engine, which raises exceptions of its own.
            raise from_exception(error, RequestContext({}, None)) from error


def _request(adapter: Adapter | EngineAdapter) -> LoRARequest:
    return LoRARequest(adapter.name, adapter.id, adapter.path)


class LeasedNames(Mapping[str, LoRARequest]):
    """Replaces `lora_requests` of vLLM's models: maps names to LoRA requests of the engine."""

    def __init__(self, adapters: AdapterRegistry) -> None:
        self._adapters = adapters

    def __getitem__(self, name: str) -> LoRARequest:
        """Return the adapter that the current request holds a lease of, if that is its name."""
        adapter = _leased.get()
        if adapter is None or adapter.name != name:
            raise KeyError(name)
        return _request(adapter)

    def __iter__(self) -> Iterator[str]:
        return (adapter.name for adapter in self._adapters.ready())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def values(self) -> Any:
        """Return the ready adapters as LoRA requests, for vLLM's list of models."""
        return [_request(adapter) for adapter in self._adapters.ready()]


async def open_adapters(
    engine: AsyncLLM,
    models: OpenAIServingModels,
    static: Sequence[LoRAModulePath] | None,
    settings: ServerSettings,
) -> AdapterRegistry | None:
    """Return the registry with the command line's adapters and those before a restart.

    It replaces the adapters of vLLM's `models`. None without --enable-lora. Raises
    `LaunchError` for an adapter of the command line that cannot be loaded.
    """
    config = engine.vllm_config.lora_config
    if config is None:
        return None
    port = EngineAdapters(engine)
    served = [path.name for path in models.base_model_paths]
    names = [engine.model_config.model, *served, *settings.lora_base_names]
    base = ServedModel.of(names, await port.targets(), config.max_lora_rank)
    limits = RegistryLimits(frozenset(served), config.max_loras, settings.lora_root)
    state_file = await in_thread(partial(_state_file, settings))
    adapters = AdapterRegistry(port, base, limits, state_file)
    for module in static or ():
        if module.is_3d_lora_weight:
            raise LaunchError(
                f"--lora-modules {module.name}: is_3d_lora_weight is not taken: the file's shapes "
                "tell whether its experts are stacked; drop it"
            )
        named = module.base_model_name
        if named is not None and named not in adapters.limits.reserved_names:
            raise LaunchError(
                f"--lora-modules {module.name}: base_model_name is {named!r}, and the served model "
                f"is {' or '.join(map(repr, sorted(adapters.limits.reserved_names)))}"
            )
        try:
            await adapters.load_static(module.name, module.path, named)
        except ServerError as error:
            raise LaunchError(f"--lora-modules {module.name}: {error.message}") from error
    await adapters.restore()
    use_lora_requests(models, LeasedNames(adapters))
    return adapters


def _state_file(settings: ServerSettings) -> StateFile | None:
    if settings.lora_root is None:
        return None
    given = settings.lora_state_file
    file = StateFile(given or settings.lora_root / STATE_FILE)
    if file.writable():
        return file
    if given is not None:
        raise LaunchError(f"--lora-state-file: {str(given)!r} cannot be written")
    logger.warning(
        "%s cannot be written: adapters that are loaded over HTTP are forgotten at a restart; "
        "--lora-state-file names another place",
        file.path,
    )
    return None
