"""An engine whose buckets change in a few calls, with steps that a test counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rbln_backend.bucketing.usage import Usage
from server.buckets.engine_buckets import Tables

START: Tables = {"decode": [1, 8, 32], "prefill": [64, 256]}


@dataclass
class ScriptedBuckets:
    """`server.buckets.engine_buckets.BucketPort`: each `advance` makes a graph, then swaps."""

    tables: Tables = field(default_factory=lambda: START)
    refusal: str | None = None
    error: str | None = None
    counts: Usage = field(default_factory=Usage)
    wanted: Tables | None = None
    graphs: int = 2
    done: int = 0
    released: int = 0

    def step(self, size: int, seconds: float, steps: int) -> None:
        """Count decode steps of `size` rows, each of `seconds`, in the present sizes."""
        bucket = next(b for b in self.tables["decode"] if b >= size)
        self.counts.phases["decode"].note(size, bucket, seconds * steps, steps)

    async def state(self) -> dict[str, Any]:
        largest = {phase: sizes[-1] for phase, sizes in self.tables.items()}
        return {**self.tables, "largest": largest, "refusal": self.refusal}

    async def start(self, tables: Tables) -> dict[str, Any]:
        self.wanted, self.done = tables, 0
        return self._report()

    async def advance(self) -> dict[str, Any]:
        assert self.wanted is not None
        if self.done < self.graphs:
            self.done += 1
        else:
            self.tables, self.wanted = self.wanted, None
        return self._report()

    async def release(self) -> int:
        self.released += 1
        return self.graphs

    async def usage(self) -> Usage | None:
        total = Usage()
        total.add(self.counts)
        return total

    def _report(self) -> dict[str, Any]:
        phase = "done" if self.wanted is None else "swap"
        if self.done < self.graphs:
            phase = "compile"
        if self.error is not None:
            phase = "failed"
        graphs = {"loaded": self.done}
        counts = {"done": self.done, "total": self.graphs, "seconds": 0.5}
        return {"phase": phase, "graphs": graphs, "error": self.error, **counts}
