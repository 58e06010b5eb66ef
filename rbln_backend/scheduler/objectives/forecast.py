"""Predicted times of a request from the load of a scheduler and measured step times (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rbln_backend.scheduler.objectives.step_clock import DECODE, PREFILL

Seconds = Callable[[str, int], float | None]
"""Returns the seconds of a step of a phase and so many tokens or rows; None: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAhead:
    """Work of the device before the first token of a new request.

    ``own`` and ``prompts`` are tokens left to compute: of the request itself, after its prefix hit,
    and of the prompts before it. ``answers`` are the tokens that each running answer may still get.
    ``rows`` is the most requests that run at once.
    """

    own: int
    prompts: Sequence[int]
    answers: Sequence[int]
    rows: int
    decodes_per_chunk: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds to the first token, and of a decode step with the request; None: not known."""

    first_token_s: float | None
    token_s: float | None


def forecast(load: LoadAhead, seconds: Seconds, next_chunk: Callable[[int], int]) -> Forecast:
    """Return the predicted times; ``next_chunk`` cuts a prompt of so many tokens left.

    Prompts share no chunk, and running answers end at their limits: a cautious prediction.
    """
    rows = min(len(load.answers) + len(load.prompts) + 1, load.rows)
    token_s = seconds(DECODE, rows)
    total, decode_s = 0.0, seconds(DECODE, max(1, min(len(load.answers), load.rows)))
    for tokens in _chunks([*load.prompts, load.own], next_chunk):
        chunk_s = seconds(PREFILL, tokens)
        if chunk_s is None:
            return Forecast(None, token_s)
        total += chunk_s
        if load.answers:
            total += load.decodes_per_chunk * (decode_s or 0.0)
    return Forecast(total + _wait_for_row(load) * (decode_s or 0.0), token_s)


def _wait_for_row(load: LoadAhead) -> int:
    """Return the decode steps until enough running answers have ended."""
    missing = len(load.answers) + len(load.prompts) + 1 - load.rows
    if missing <= 0 or not load.answers:
        return 0
    return sorted(load.answers)[min(missing, len(load.answers)) - 1]


def _chunks(prompts: Sequence[int], next_chunk: Callable[[int], int]) -> Iterator[int]:
    for left in prompts:
        while left > 0:
            chunk = min(left, next_chunk(left))
            yield chunk
            left -= chunk
