"""Settings of start, stop, failure and logs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from server.setting_groups.values import OptionalPath


class LifeSettings(BaseModel):
    """Start, stop, failure, logs."""

    drain_timeout_s: float = Field(
        25.0, ge=0, description="Seconds that in-flight requests get to finish after SIGTERM."
    )
    death_linger_s: float = Field(
        2.0,
        ge=0,
        description="Seconds to answer 503 with the reason after the engine died or could not "
        "start, before exiting.",
    )
    step_timeout_s: float = Field(
        120.0,
        ge=0,
        description="Seconds without a finished step, while there is work, after which the engine "
        "counts as hung and the process ends. 0: never.",
    )
    run_root: OptionalPath = Field(
        None, description="Where the run directory is made; unset takes the system's."
    )
    engine_start: Literal["forkserver", "spawn"] = Field(
        "forkserver",
        description="How the engine process starts; `spawn` is slower and needs no fork server.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe messages of the server's own log."
    )
    log_format: Literal["text", "json"] = Field("text", description="Form of the server's log.")
