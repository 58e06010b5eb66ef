"""Sizes that a client requests, checked against the present ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from server.buckets.engine_buckets import Tables
from server.errors import InvalidValueError, UnsupportedOperationError, describe

PHASES = ("decode", "prefill")
AUTO = "auto"
MAX_SIZES = 64
_LIMITS = {"decode": "max_num_seqs", "prefill": "max_num_batched_tokens"}

Sizes = list[int] | Literal["auto"] | None
"""Sizes of a phase; `auto`: the tuner's, None: the present ones."""


def requested_tables(
    wanted: Mapping[str, Sizes], state: Mapping[str, Any], advice: Mapping[str, Any] | None
) -> Tables:
    """Return the sizes by phase.

    `state` is the engine's (`BucketPort.state`), `advice` the tuner's by phase. Raises the
    `RequestError` of the first invalid field.
    """
    if all(wanted[phase] is None for phase in PHASES):
        raise InvalidValueError(
            "'decode' or 'prefill' must be given: a list of sizes, or \"auto\".", param="decode"
        )
    if wanted["decode"] is not None and not state["decode"]:
        raise UnsupportedOperationError(
            "'decode' must be left out: this model pools, and has prefill graphs alone.",
            param="decode",
        )
    return {phase: _sizes(phase, wanted[phase], state, advice) for phase in PHASES}


def _sizes(
    phase: str, wanted: Sizes, state: Mapping[str, Any], advice: Mapping[str, Any] | None
) -> list[int]:
    if wanted is None:
        return list(state[phase])
    if wanted == AUTO:
        found = (advice or {}).get(phase)
        if found is None:
            raise UnsupportedOperationError(
                f"'{phase}' is \"auto\", but no {phase} steps are recorded yet; counts are "
                "written once a minute (--additional-config record_usage).",
                param=phase,
            )
        return list(found["suggested"])
    assert isinstance(wanted, list)
    _check(phase, wanted, state["largest"][phase])
    return wanted


def _check(phase: str, sizes: list[int], largest: int) -> None:
    def refuse(rule: str) -> InvalidValueError:
        return InvalidValueError(f"'{phase}' {rule}, got {describe(sizes)}.", param=phase)

    if not sizes:
        raise refuse("must have at least one size")
    if len(sizes) > MAX_SIZES:
        raise refuse(f"must have at most {MAX_SIZES} sizes")
    if sizes[0] < 1:
        raise refuse("must have sizes of 1 or more")
    if sorted(set(sizes)) != sizes:
        raise refuse("must be ascending, without duplicates")
    limit = f"{_LIMITS[phase]} {largest}"
    if sizes[-1] > largest:
        raise refuse(f"must have no size above {limit}")
    if sizes[-1] != largest:
        raise refuse(f"must end at {limit}, so that every step has a graph")
