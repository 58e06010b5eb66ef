"""Start-up progress of each worker, for the terminal and for the API process.

Each rank appends JSON lines to `<run_dir>/progress-<rank>.jsonl`; the API process combines the
files of all ranks. Invariants (tests/unit/test_progress.py): a line is written with one
system call, so that at most the last line is incomplete; the phase `init` resets a rank's state; a
failed write never stops a start-up.

One instance (one HTTP process, one run directory) may have several engines (data parallel), each
with several ranks (tensor times pipeline parallel). Invariants
(tests/unit/test_progress.py): workers of an instance have distinct numbers; exactly one rank
of an engine counts its steps, and exactly one its samples. The seconds of the last start below a
cache root are the forecast of the next one.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from rbln_backend.errors import RblnError
from rbln_backend.host.files import replace_file

logger = logging.getLogger(__name__)

PHASES: tuple[str, ...] = ("init", "load", "compile", "warmup", "ready")
"""Phases of a start-up, in order."""

_BAR_WIDTH = 24
_LINE_PERIOD_S = 5.0


@dataclass(frozen=True, slots=True)
class GraphProgress:
    """One graph: `state` is pending, running or done; `result` is compiled or loaded."""

    name: str
    state: str
    result: str | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """Progress over all ranks.

    A graph is done when all ranks that planned it have finished it; its seconds are those of the
    slowest rank. `eta_s` is None while no step and no graph of the phase is done. `updated` is the
    Unix time of the latest event, None before the first. `failure` is the reason of a failed rank.
    """

    phase: str
    graphs_total: int
    graphs_done: int
    graphs: list[GraphProgress]
    eta_s: float | None
    detail: str
    updated: float | None
    failure: str | None = None


class ProgressWriter:
    """Writer of one rank's progress; `terminal` is None for ranks without terminal output.

    A tty gets one bar that is redrawn; other outputs get a line on graphs every five seconds, and
    one when all are done.
    """

    def __init__(
        self,
        run_dir: Path | None,
        rank: int,
        terminal: TextIO | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file: BinaryIO | None = None
        self._terminal = terminal
        self._redraws = terminal is not None and terminal.isatty()
        self._planned: list[str] = []
        self._results: Counter[str] = Counter()
        self._clock = clock
        self._planned_at = self._printed_at = clock()
        if run_dir is not None:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
                self._file = (run_dir / f"progress-{rank}.jsonl").open("ab", buffering=0)
            except OSError as error:
                logger.warning("No start-up progress for other processes: %s", error)

    def phase(self, name: str, detail: str = "") -> None:
        """Enter a phase; `detail` describes it in a few words."""
        if name not in PHASES:
            raise ValueError(f"Unknown phase {name!r}, valid choices: {', '.join(PHASES)}")
        if name == "init":
            self._reset_graphs([])
        self._append({"event": "phase", "name": name, "detail": detail})
        if detail or name == "ready":
            self._print(f"{name}: {detail}" if detail else name)

    def step(self, detail: str, done: int, total: int) -> None:
        text = f"{detail}: {done} of {total}"
        self._append({"event": "step", "detail": text, "share": done / total})
        if self._redraws:
            self._emit(f"\rrbln: {text}\x1b[K")

    def plan(self, graphs: list[str], workers: int = 1) -> None:
        """Report the graphs to compile or load, in order; `workers` of them compile at once."""
        self._reset_graphs(graphs)
        self._append({"event": "plan", "graphs": self._planned, "workers": workers})

    def graph_started(self, name: str) -> None:
        self._append({"event": "graph_started", "name": name})
        if self._redraws:
            self._draw(name)

    def graph_done(self, name: str, result: str, seconds: float) -> None:
        """Report a graph as `compiled` or `loaded`, with its seconds."""
        self._results[result] += 1
        self._append(
            {"event": "graph_done", "name": name, "result": result, "seconds": round(seconds, 6)}
        )
        done = self._results.total()
        if done >= len(self._planned):
            made = ", ".join(f"{count} {result}" for result, count in sorted(self._results.items()))
            since = f"{made} in {self._clock() - self._planned_at:.1f} s"
            if self._redraws:
                self._draw(f"graphs: {since}", end="\n")
            else:
                self._print(f"compile: {done} graphs: {since}")
        elif self._redraws:
            self._draw(f"{name} {result} in {seconds:.2f} s")
        elif self._clock() - self._printed_at >= _LINE_PERIOD_S:
            self._print(f"compile: {done} of {len(self._planned)} graphs, {name} {result}")

    def failed(self, reason: str) -> None:
        self._append({"event": "failed", "reason": reason})

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Report an exception of the block as the reason of the failure, and raise it."""
        try:
            yield
        except Exception as error:
            # Messages of other errors may need their class to be understood.
            ours = isinstance(error, RblnError)
            self.failed(str(error) if ours else f"{type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _reset_graphs(self, planned: Sequence[str]) -> None:
        self._planned, self._planned_at = list(planned), self._clock()
        self._results.clear()

    def _append(self, event: dict[str, object]) -> None:
        if self._file is None:
            return
        line = json.dumps({"time": time.time(), **event}) + "\n"
        try:
            self._file.write(line.encode())
        except OSError as error:
            logger.warning("No further start-up progress for other processes: %s", error)
            self.close()

    def _draw(self, text: str, end: str = "") -> None:
        done = self._results.total()
        total = max(len(self._planned), done, 1)
        filled = _BAR_WIDTH * done // total
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        # Erase to the end of the line: the previous text may have been longer.
        self._emit(f"\r[{bar}] {done}/{total} {text}\x1b[K{end}")

    def _print(self, text: str) -> None:
        self._printed_at = self._clock()
        # Erase the drawn line.
        erase = "\r\x1b[K" if self._redraws else ""
        self._emit(f"{erase}rbln: {text}\n")

    def _emit(self, text: str) -> None:
        if self._terminal is None:
            return
        try:
            self._terminal.write(text)
            self._terminal.flush()
        except (OSError, ValueError):
            # A closed terminal or pipe: the service continues without terminal output.
            self._terminal = None


@dataclass(slots=True)
class _RankProgress:
    """State of one rank; `offset` is the first byte that is not read yet."""

    offset: int = 0
    phase: str = "init"
    detail: str = ""
    updated: float | None = None
    failure: str | None = None
    graphs: dict[str, GraphProgress] = field(default_factory=dict)
    workers: int = 1
    entered: float | None = None
    share: float = 0.0

    def fold(self, event: dict[str, Any]) -> None:
        """Apply one event; an unknown kind of event only changes `updated`."""
        self.updated = float(event["time"])
        kind = event["event"]
        if kind == "phase":
            phase = event["name"]
            if phase not in PHASES:
                raise ValueError(f"Unknown phase {phase!r}")
            if phase == "init":
                self.graphs, self.failure = {}, None
            if phase != self.phase or self.entered is None:
                self.entered, self.share = self.updated, 0.0
            self.phase, self.detail = phase, event["detail"]
        elif kind == "step":
            self.detail, self.share = event["detail"], float(event["share"])
        elif kind == "plan":
            self.graphs = {g: GraphProgress(g, "pending", None, None) for g in event["graphs"]}
            self.workers = int(event["workers"])
        elif kind == "graph_started":
            name = event["name"]
            self.graphs[name] = GraphProgress(name, "running", None, None)
        elif kind == "graph_done":
            name = event["name"]
            self.graphs[name] = GraphProgress(name, "done", event["result"], event["seconds"])
        elif kind == "failed":
            self.failure = str(event["reason"])


class ProgressReader:
    """Reader of all ranks' files in `run_dir`; each poll reads only new lines."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._ranks: dict[str, _RankProgress] = {}

    def poll(self) -> ProgressSnapshot:
        """Read the new lines of every rank and return the combined progress."""
        for path in sorted(self._run_dir.glob("progress-*.jsonl")):
            self._read(path)
        ranks = list(self._ranks.values())
        if not ranks:
            return ProgressSnapshot("init", 0, 0, [], None, "", None)
        slowest = min(ranks, key=lambda rank: PHASES.index(rank.phase))
        # Equal graphs of several ranks are one, in the order of the plans.
        names = dict.fromkeys(name for rank in ranks for name in rank.graphs)
        graphs = [
            _merge([rank.graphs[name] for rank in ranks if name in rank.graphs]) for name in names
        ]
        num_done = sum(graph.state == "done" for graph in graphs)
        times = [rank.updated for rank in ranks if rank.updated is not None]
        updated = max(times, default=None)
        return ProgressSnapshot(
            phase=slowest.phase,
            graphs_total=len(graphs),
            graphs_done=num_done,
            graphs=graphs,
            eta_s=_eta(slowest, graphs, updated, self._clock()),
            detail=slowest.detail,
            updated=updated,
            failure=next((rank.failure for rank in ranks if rank.failure), None),
        )

    def _read(self, path: Path) -> None:
        rank = self._ranks.setdefault(path.name, _RankProgress())
        try:
            with path.open("rb") as file:
                file.seek(rank.offset)
                data = file.read()
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        rank.offset += end
        for line in data[:end].splitlines():
            try:
                rank.fold(json.loads(line))
            except (ValueError, KeyError, TypeError):
                logger.warning("Skipped a malformed progress line in %s", path)


def _merge(parts: list[GraphProgress]) -> GraphProgress:
    states = {part.state for part in parts}
    name = parts[0].name
    if states != {"done"}:
        state = "pending" if states == {"pending"} else "running"
        return GraphProgress(name, state, None, None)
    result = "compiled" if any(part.result == "compiled" for part in parts) else "loaded"
    return GraphProgress(name, "done", result, max(part.seconds or 0.0 for part in parts))


def _eta(
    slowest: _RankProgress, graphs: list[GraphProgress], updated: float | None, now: float
) -> float | None:
    """Return the remaining seconds of this phase at its pace, None before it has one."""
    if slowest.phase == "ready":
        return 0.0
    done = [graph for graph in graphs if graph.state == "done"]
    if done and updated is not None and slowest.phase == "compile":
        # All graphs are loaded before the first one is compiled: after one compile, the rest
        # compiles, at the mean pace of those.
        like = [graph for graph in done if graph.result == "compiled"] or done
        mean_s = sum(graph.seconds or 0.0 for graph in like) / len(like)
        remaining = len(graphs) - len(done)
        rounds = max(1.0, remaining / slowest.workers) if remaining else 0.0
        return max(0.0, rounds * mean_s - max(0.0, now - updated))
    if slowest.share and slowest.entered is not None:
        return (now - slowest.entered) * (1.0 - slowest.share) / slowest.share
    return None


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Position of a worker.

    `engine` is the index of the data-parallel engine, as in vLLM's metrics. `rank` is the index
    within the engine, which has `ranks` ranks, `tensor_ranks` per pipeline stage. Of the ranks of
    all engines `local_ranks` are on this host; `local_number` is the index among these.
    """

    engine: int = 0
    rank: int = 0
    ranks: int = 1
    tensor_ranks: int = 1
    local_number: int = 0
    local_ranks: int = 1

    def __post_init__(self) -> None:
        if self.engine < 0 or not 0 <= self.rank < self.ranks:
            raise ValueError(f"There is no rank {self.rank} of {self.ranks} in {self.engine}")
        if self.tensor_ranks < 1 or self.ranks % self.tensor_ranks:
            raise ValueError(f"{self.ranks} ranks cannot be stages of {self.tensor_ranks}")

    @property
    def number(self) -> int:
        """Index of this worker in its instance; part of its file names."""
        return self.engine * self.ranks + self.rank

    @property
    def counts_steps(self) -> bool:
        """True for the rank that counts the steps of its engine."""
        return self.rank == 0

    @property
    def replies(self) -> bool:
        """True for the rank whose results the executor reads: the first of the last stage.

        It also counts the work of that stage after the graph.
        """
        return self.rank == self.ranks - self.tensor_ranks


_LONGEST_S = 1e7


class LastStart:
    """The file `<cache_root>/rbln/last_start.json`, which holds one number.

    An unreadable or unwritable file is ignored.
    """

    def __init__(self, cache_root: Path) -> None:
        self._path = cache_root / "rbln" / "last_start.json"

    def seconds(self) -> float | None:
        """Return the seconds from process start to `ready`, None if they are unknown."""
        try:
            content = json.loads(self._path.read_text())
        except (OSError, ValueError, RecursionError):
            return None
        return content if isinstance(content, float) and 0 <= content < _LONGEST_S else None

    def keep(self, seconds: float) -> None:
        try:
            replace_file(self._path, json.dumps(round(seconds, 3)).encode())
        except OSError as error:
            logger.debug("The duration of this start is not stored: %s", error)
