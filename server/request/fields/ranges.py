"""Ranges of sampling parameters that vLLM checks without naming the field in its error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from server.errors import InvalidValueError, describe
from server.wire.endpoint import JsonObject


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """Accepted numbers: `low` to `high`; `low` itself only if `closed`."""

    low: float
    high: float = math.inf
    closed: bool = True

    def holds(self, value: float) -> bool:
        """Return whether `value` is finite and inside."""
        above = value >= self.low if self.closed else value > self.low
        return above and value <= self.high and math.isfinite(value)

    def __str__(self) -> str:
        if not math.isinf(self.high):
            return f"between {self.low} and {self.high}"
        return f"at least {self.low:g}" if self.closed else f"a finite number above {self.low:g}"


_INT64_MAX = 2**63 - 1
"""Largest integer that reaches the engine's process on every path."""

_RANGES: Mapping[str, ParameterRange] = {
    "presence_penalty": ParameterRange(-2, 2),
    "frequency_penalty": ParameterRange(-2, 2),
    "repetition_penalty": ParameterRange(0, closed=False),
    "min_p": ParameterRange(0, 1),
    "min_tokens": ParameterRange(0),
    # -1 and 0 switch it off.
    "top_k": ParameterRange(-1, _INT64_MAX),
    "stream_interval": ParameterRange(1, _INT64_MAX),
    # An exponent of the answer's length: floats hold its power for every context.
    "length_penalty": ParameterRange(-32, 32),
}
"""vLLM's ranges in `SamplingParams._verify_args`, and bounds that it has not."""


def check_ranges(fields: JsonObject) -> None:
    """Raise `InvalidValueError` for a number outside of its range.

    Values of other types are left to the request models.
    """
    for name, accepted in _RANGES.items():
        value = fields.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not accepted.holds(value):
            raise InvalidValueError(
                f"'{name}' must be {accepted}, got {describe(value)}.", param=name
            )
