"""``RBLN_PROFILER``: profiles of the step loop, started and stopped by vLLM's methods."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch

from rbln_backend.errors import ConfigError


class StepProfiler(Protocol):
    """The profiler of a worker, behind ``start_profile`` and ``stop_profile``."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class NoProfiler:
    """No profiler: ``RBLN_PROFILER`` is not set."""

    def start(self) -> None:
        raise ConfigError("profiling is off; start the server with RBLN_PROFILER=1")

    def stop(self) -> None:
        self.start()


class EmulatedProfiler:
    """torch's profiler around the graphs; each stop writes one Chrome trace into ``directory``."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._count = 0
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        if self._profile is None:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profile.start()

    def stop(self) -> None:
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._count += 1
        profile.export_chrome_trace(
            str(self._directory / f"rank{self._rank}-{self._count}.trace.json")
        )


class RebelProfiler:
    """The SDK's profiler."""

    def __init__(self, sdk: ModuleType) -> None:
        sdk.flags.RBLN_PROFILER = True
        self._sdk = sdk

    def start(self) -> None:
        self._sdk.profiler.start()

    def stop(self) -> None:
        self._sdk.profiler.done()
