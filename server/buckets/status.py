"""The body of `/admin/buckets`."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from server.lifecycle import GraphCounts


class ChangeProgress(TypedDict):
    """A change that is not complete, in the form of `/startupz`; times in seconds.

    `graphs` and `eta_s` are of the phase.
    """

    phase: str
    graphs: GraphCounts
    elapsed_s: float
    eta_s: float | None
    decode: list[int]
    prefill: list[int]
    reason: str


class ChangeResult(TypedDict):
    """The last change. `effect` has the steps since and the saving by phase, where measured."""

    result: Literal["done", "failed"]
    error: str | None
    reason: str
    old_decode: list[int]
    old_prefill: list[int]
    decode: list[int]
    prefill: list[int]
    graphs: dict[str, int]
    seconds: float
    ended_at: float
    released: int | None
    predicted_saving: dict[str, float] | None
    effect: dict[str, Any] | None


class BucketStatus(TypedDict):
    """The present sizes, the change in progress, and the last one."""

    status: Literal["idle", "changing"]
    decode: list[int]
    prefill: list[int]
    refusal: str | None
    change: ChangeProgress | None
    last: ChangeResult | None
