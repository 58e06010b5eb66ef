"""The type of measurements that vLLM imports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class nixlXferTelemetry:  # noqa: N801 - the package's name
    """One transfer; times in microseconds."""

    totalBytes: int  # noqa: N815
    descCount: int  # noqa: N815
    xferDuration: float = 1.0  # noqa: N815
    postDuration: float = 1.0  # noqa: N815
