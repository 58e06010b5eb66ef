"""Objectives of a request: the picker's headers, or the server's defaults."""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from rbln_backend.api.requests import Miss, Objective
from server.errors import InvalidValueError, ObjectiveError, describe

TTFT_HEADER, TPOT_HEADER = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"
_MILLISECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
_NAMES = {
    "ttft": (TTFT_HEADER, "The first token is predicted to come after"),
    "tpot": (TPOT_HEADER, "A decode step with this request is predicted to take"),
}


def objective_of(headers: Headers, default: Objective) -> Objective:
    """Return the objective of a request; raises `InvalidValueError` for an invalid header."""
    return Objective(
        _milliseconds(headers, TTFT_HEADER, default.ttft_ms),
        _milliseconds(headers, TPOT_HEADER, default.tpot_ms),
    )


def missed(miss: Miss) -> ObjectiveError:
    """Return the error of a request that was refused. It says by how much to retry later."""
    header, predicted = _NAMES[miss.name]
    late_s = (miss.predicted_ms - miss.limit_ms) / 1000
    return ObjectiveError(
        f"{predicted} {miss.predicted_ms:.1f} ms; the objective is {miss.limit_ms:g} ms "
        f"({header}).",
        param=header,
        retry_after_s=max(1.0, late_s),
    )


def _milliseconds(headers: Headers, name: str, default: float | None) -> float | None:
    given = headers.get(name)
    if given is None:
        return default
    if not _MILLISECONDS.fullmatch(given) or not float(given):
        raise InvalidValueError(
            f"The header {name} must be milliseconds above 0 and below 1000000000, got "
            f"{describe(given)}.",
            param=name,
        )
    return float(given)
