"""Results of shadow parity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

ShadowResult = Literal["same", "different", "dropped"]
SHADOW_RESULTS: tuple[str, ...] = get_args(ShadowResult)


@dataclass(frozen=True, slots=True)
class ShadowCounts:
    """Answers in the sample since the start by result, and those that wait."""

    results: Mapping[ShadowResult, int]
    waiting: int
