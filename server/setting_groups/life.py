"""Settings of the process's life cycle and log."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from server.setting_groups.values import OptionalPath


class LifeSettings(BaseModel):
    """Start, stop, failure and log."""

    drain_timeout_s: float = Field(
        25.0, ge=0, description="Seconds for in-flight requests to finish after SIGTERM."
    )
    step_timeout_s: float = Field(
        120.0,
        ge=0,
        description="Seconds without a finished step, despite pending work, after which the engine "
        "counts as hung and the process exits. 0: never.",
    )
    run_root: OptionalPath = Field(
        None, description="Parent of the run directory. Unset: the system's temporary directory."
    )
    headless: bool = Field(
        False,
        description="Run data-parallel engines for the server at --data-parallel-address, without "
        "an API; probes and metrics are answered.",
    )
    engine_start: Literal["forkserver", "spawn"] = Field(
        "forkserver",
        description="Start method of the engine process; `spawn` is slower and needs no fork "
        "server.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Level of the server's log."
    )
    log_format: Literal["text", "json"] = Field("text", description="Format of the server's log.")
