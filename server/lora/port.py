"""The port between the registry of adapters and the engine that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rbln_backend.api.requests import Target

__all__ = ["AdapterPort", "EngineAdapter", "Target"]


@dataclass(frozen=True, slots=True)
class EngineAdapter:
    """An adapter as sent to the engine; `id` is never reused."""

    name: str
    id: int
    path: str


class AdapterPort(Protocol):
    """Engine operations that the registry uses. Every failure is a `ServerError`."""

    async def targets(self) -> Mapping[str, Target]:
        """Return the adaptable layers by module path."""
        ...

    async def stage(self, adapter: EngineAdapter) -> None:
        """Start to read an adapter in the background."""
        ...

    async def staged(self, adapter_id: int) -> tuple[str, str]:
        """Return ("reading", ""), ("ready", "") or ("failed", the reason)."""
        ...

    async def add(self, adapter: EngineAdapter) -> None:
        """Copy a staged adapter into a free slot, between two steps."""
        ...

    async def remove(self, adapter_id: int) -> None:
        """Drop an adapter that no request uses, staged or in a slot; ignores unknown ids."""
        ...

    async def slots(self) -> Mapping[int, int]:
        """Return the slot of each adapter by its id."""
        ...
