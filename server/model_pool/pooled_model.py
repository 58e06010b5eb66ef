"""One model of the file: its state, its waiting and running requests, its last load."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Container
from dataclasses import dataclass, field

from server.model_pool.model_process import ModelProcess
from server.model_pool.models_file import ModelEntry

_FIRST_LOAD_S = 30.0
"""Expected seconds of a load, before there was one."""


class ModelState(enum.Enum):
    """States of a model; the value is the name in probes and metrics."""

    ASLEEP = "asleep"
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"
    """Its running requests end; new ones wait."""
    STOPPING = "stopping"
    """Its process ends."""


@dataclass(eq=False)
class PooledModel:
    """State of one model; times are values of `time.monotonic`. Used from the event loop only."""

    entry: ModelEntry
    adapters: Container[str] = ()
    """Names of its adapters."""
    needed_bytes: int = 0
    """Estimate of the memory while loaded."""
    state: ModelState = ModelState.ASLEEP
    process: ModelProcess | None = None
    in_flight: int = 0
    waiting: int = 0
    wanted_since: float | None = None
    """Since when a request, or an operator, waits for the model."""
    kept_awake: bool = False
    """True from /wake_up until the model is ready."""
    put_to_sleep: bool = False
    """True from /sleep until the model is asleep."""
    ready_since: float = 0.0
    used_at: float = 0.0
    measured_bytes: int = 0
    load_s: float | None = None
    loads: int = 0
    failures: int = 0
    retry_at: float = 0.0
    reason: str | None = None
    """Why the last process ended by itself."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """The name in requests."""
        return self.entry.name

    @property
    def held_bytes(self) -> int:
        """Memory that the model holds now, or will once it is loaded."""
        return 0 if self.state is ModelState.ASLEEP else self.load_bytes

    @property
    def load_bytes(self) -> int:
        """Memory that the model needs, by its estimate and by the last measurement."""
        return max(self.needed_bytes, self.measured_bytes)

    @property
    def wanted(self) -> bool:
        """True if something waits for the model."""
        return bool(self.waiting) or self.kept_awake or self.entry.pinned

    def remaining_load_s(self) -> float:
        """Return the seconds that a running load, or one that begins now, still takes."""
        expected_s = _FIRST_LOAD_S if self.load_s is None else self.load_s
        if self.state is not ModelState.LOADING or self.process is None:
            return expected_s
        if self.process.eta_s is not None:
            return self.process.eta_s
        return max(1.0, expected_s - (time.monotonic() - self.process.started))

    def notify(self) -> None:
        """Wake the tasks that wait for a change of the state."""
        self.changed.set()
        self.changed = asyncio.Event()
