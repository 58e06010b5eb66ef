"""What the scheduler tells the workers beyond vLLM's output."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from rbln_backend.kv_cache.transfers import WindowTransfers
from rbln_backend.vllm_compat.surface import SchedulerOutput

_NO_TRANSFERS = WindowTransfers()


@dataclass
class WindowedSchedulerOutput(SchedulerOutput):
    """A step that also moves window state."""

    window_transfers: WindowTransfers = field(default_factory=WindowTransfers)


def with_transfers(output: SchedulerOutput, transfers: WindowTransfers) -> SchedulerOutput:
    """``output`` with the moves of its step; the same object when there are none."""
    if not transfers:
        return output
    values = {item.name: getattr(output, item.name) for item in fields(output)}
    return WindowedSchedulerOutput(**values, window_transfers=transfers)


def window_transfers(output: SchedulerOutput) -> WindowTransfers:
    """The moves of a step; empty for a plain output."""
    if isinstance(output, WindowedSchedulerOutput):
        return output.window_transfers
    return _NO_TRANSFERS
