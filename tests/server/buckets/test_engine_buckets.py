"""The calls of a change on several ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from server.buckets.engine_buckets import EngineBucketCalls

TABLES = {"decode": [1, 4], "prefill": [64]}
PHASES = ("compile", "warmup", "swap", "done")


@dataclass
class Rank:
    """Needs a number of calls in each phase, and fails in one of them if a test says so."""

    calls_of_phase: dict[str, int]
    fails_in: str | None = None
    phase: str = "compile"
    done: int = 0
    error: str | None = None

    def start_bucket_change(self, *_: object) -> dict[str, Any]:
        return self._report()

    def advance_bucket_change(self, phase: str) -> dict[str, Any]:
        if phase == self.phase == self.fails_in:
            self.stop_bucket_change("no room")
        elif phase == self.phase:
            self.done += 1
            if self.done >= self.calls_of_phase.get(phase, 1):
                self.phase, self.done = PHASES[PHASES.index(phase) + 1], 0
        return self._report()

    def stop_bucket_change(self, reason: str) -> None:
        self.phase, self.error = "failed", reason

    def _report(self) -> dict[str, Any]:
        return {"phase": self.phase, "done": self.done, "total": 2, "error": self.error}


@dataclass
class Ranks:
    """Calls all ranks, as an executor does, and notes their phases before each call."""

    ranks: list[Rank]
    seen: list[list[str]] = field(default_factory=list)

    async def __call__(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        self.seen.append([rank.phase for rank in self.ranks])
        return [getattr(rank, method)(*args) for rank in self.ranks]


async def _run(ranks: Ranks) -> dict[str, Any]:
    port = EngineBucketCalls(ranks)
    report = await port.start(TABLES)
    while report["phase"] not in ("done", "failed"):
        report = await port.advance()
    return report


async def test_no_rank_runs_a_graph_before_all_have_it() -> None:
    ranks = Ranks([Rank({"compile": 2, "warmup": 2}), Rank({"compile": 5, "warmup": 2})])
    assert (await _run(ranks))["phase"] == "done"
    assert ["warmup", "compile"] in ranks.seen
    assert ["swap", "warmup"] not in ranks.seen, "graphs run in the same calls"
    assert ranks.seen[-1] == ["swap", "swap"]


async def test_the_failure_of_a_rank_stops_the_others() -> None:
    ranks = Ranks([Rank({"compile": 2}), Rank({"compile": 4}, fails_in="warmup")])
    assert (await _run(ranks))["error"] == "no room"
    assert [rank.phase for rank in ranks.ranks] == ["failed", "failed"]
