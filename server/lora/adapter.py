"""State of one LoRA adapter: its path, slot and number of running requests."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import TypedDict


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
    """JSON object of an adapter in answers; see `Adapter`."""

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
        """Return the JSON object of the adapter."""
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
