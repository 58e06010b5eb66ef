"""One LoRA adapter as the server knows it: where it lies, its state, who uses it."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import TypedDict


class State(enum.StrEnum):
    """What an adapter is good for; the value is what clients see."""

    LOADING = "loading"
    """It is checked, read and copied into a slot; requests do not find it yet."""
    READY = "ready"
    DRAINING = "draining"
    """Nobody finds it any more; its slot is freed after the last request that did."""
    FAILED = "failed"
    """It could not be loaded at start, or the engine could not drop it; `error` says why."""


class AdapterObject(TypedDict):
    """What clients see of an adapter; see `Adapter`."""

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
    """One load of an adapter; a name that is loaded again is another one, with another `id`.

    `source` is the path as it was asked for, `path` the real one once it was checked.
    `loaded_at` is Unix time in seconds. `base` names the model it belongs to, when told.
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
    """Set once the engine has dropped it, or failed to."""

    def to_dict(self) -> AdapterObject:
        """Return what clients see."""
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
