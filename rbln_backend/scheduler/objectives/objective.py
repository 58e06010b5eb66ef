"""Objectives of a request, as the server passes them to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

OBJECTIVE_ARGS = "slo_objective"
"""Name of the objective among a request's ``extra_args``."""
OBJECTIVE_MISSED = "objective_missed"
"""Stop reason of a request that was refused; ``kv_transfer_params`` has its ``Miss``."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Milliseconds to the first token, and between tokens; None: any time."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def as_args(self) -> dict[str, Any]:
        """Return the form that ``of`` reads; empty without an objective."""
        return {OBJECTIVE_ARGS: [self.ttft_ms, self.tpot_ms]} if self else {}

    @classmethod
    def of(cls, args: Mapping[str, Any] | None) -> Objective:
        """Return the objective in ``args``; the empty one if it is absent or malformed."""
        match (args or {}).get(OBJECTIVE_ARGS):
            case [int() | float() | None as ttft_ms, int() | float() | None as tpot_ms]:
                return cls(ttft_ms, tpot_ms)
        return cls()

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


@dataclass(frozen=True, slots=True)
class Miss:
    """A predicted time over its limit, in milliseconds; ``name`` is ``ttft`` or ``tpot``."""

    name: str
    predicted_ms: float
    limit_ms: float

    def as_report(self) -> dict[str, Any]:
        """Return the form that the server reads."""
        return asdict(self)
