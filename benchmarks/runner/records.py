"""Records of a comparison: one line of JSON per measurement, written immediately.

Units: seconds and bytes. The file of an interrupted run is readable.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from benchmarks.clients.load import RequestOutcome
from benchmarks.runner.command import DISTURBED_CORES
from benchmarks.runner.machine import Limits, ModelWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The run: command line, machine (`Machine` as a dictionary), descriptions of sides."""

    started: str
    command: str
    machine: dict[str, Any]
    load_before: float
    peer_versions: dict[str, str]
    sides: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """A model of the run."""

    model: str
    path: str
    parameters: int
    work: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsRecord:
    """Limits of the machine at the start of a round, with every engine stopped."""

    model: str
    round: int
    part: str
    bytes_per_s: float
    flops_per_s: float
    unit: str = "FMA"
    other_busy_cores: float = 0.0

    @property
    def limits(self) -> Limits:
        return Limits(self.bytes_per_s, self.flops_per_s, self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """Self-description of a measured engine or server."""

    model: str
    part: str
    side: str
    about: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One command to an engine in process; `output_tokens` 1 is a measurement of prefill.

    `step_seconds` are those of worker_protocol; `other_busy_cores` are those of other processes.
    """

    model: str
    round: int
    side: str
    batch: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    first_token_seconds: list[float | None]
    step_seconds: list[float]
    first_tokens: list[int]
    other_busy_cores: float

    @property
    def decodes(self) -> bool:
        """True unless the record measures prefill."""
        return self.output_tokens > 1

    @property
    def step(self) -> float | None:
        """Median decode step without the first two, which fill the caches."""
        return statistics.median(self.step_seconds[2:]) if len(self.step_seconds) > 4 else None

    @property
    def context(self) -> float:
        """Mean number of tokens in the cache during the timed steps."""
        return self.prompt_tokens + len(self.step_seconds) / 2

    @property
    def prefill(self) -> float | None:
        """Seconds to the last prompt's first token."""
        times = [time for time in self.first_token_seconds if time is not None]
        return max(times) if len(times) == self.batch else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRecord:
    """One load on a server: `prompts` are lengths in tokens, one per planned request."""

    model: str
    round: int
    side: str
    concurrency: int
    prompts: list[int]
    output_tokens: int
    seconds: float
    gaps: list[float]
    requests: list[dict[str, Any]]
    http_cpu_seconds: float
    engine_cpu_seconds: float
    pss: int
    other_busy_cores: float

    @property
    def outcomes(self) -> list[RequestOutcome]:
        return [RequestOutcome(**request) for request in self.requests]

    @property
    def is_whole(self) -> bool:
        """True if no stream was cut off or failed."""
        all_sent = len(self.requests) == len(self.prompts)
        return all_sent and all(outcome.error is None for outcome in self.outcomes)

    @property
    def tokens(self) -> int:
        return sum(outcome.tokens for outcome in self.outcomes)

    @property
    def ttft(self) -> float | None:
        """Median over requests with a token."""
        return _median([outcome.ttft for outcome in self.outcomes])

    @property
    def itl(self) -> float | None:
        """Median over requests of their mean time per token after the first."""
        return _median([outcome.itl for outcome in self.outcomes])

    @property
    def output_rate(self) -> float | None:
        """Output tokens per second, end to end.

        For a load that was cut off while every request was decoding, the rate is extrapolated;
        for others that were cut off, it is the rate so far.
        """
        outcomes = self.outcomes
        if self.is_whole or not self.tokens:
            return self.tokens / self.seconds if self.tokens else None
        if len(outcomes) < len(self.prompts) or any(o.itl is None for o in outcomes):
            return self.tokens / self.seconds
        rest = max((self.output_tokens - o.tokens) * (o.itl or 0.0) for o in outcomes)
        return self.output_tokens * len(outcomes) / (self.seconds + rest)

    @property
    def prompt_rate(self) -> float | None:
        """Prompt tokens per second until every request had its first token; None if cut off."""
        firsts = [outcome.first for outcome in self.outcomes if outcome.first is not None]
        whole = len(firsts) == len(self.prompts)
        return sum(self.prompts) / max(firsts) if whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """One start of a server, `cold` with an empty cache root; `ServerProcess` has the times."""

    model: str
    side: str
    cold: bool
    listening_s: float
    ready_s: float
    answered_s: float
    cpu_seconds: float
    pss: int
    rss: int
    private: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A side that could not be measured, with the reason."""

    model: str
    part: str
    side: str
    text: str


Record = (
    Header
    | ModelRecord
    | LimitsRecord
    | EngineRecord
    | StepRecord
    | HttpRecord
    | StartRecord
    | Failure
)
RecordT = TypeVar("RecordT", bound=Record)


class Log:
    """The records of one run, in memory and on disk."""

    _KINDS: ClassVar[dict[str, type[Any]]] = {kind.__name__: kind for kind in Record.__args__}

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []

    def add(self, record: Record) -> None:
        """Add `record` and write it to disk."""
        self.records.append(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"record": type(record).__name__} | asdict(record)) + "\n")

    @classmethod
    def read(cls, path: Path) -> Log:
        """Return the records of an earlier run; raises OSError or ValueError."""
        log = cls(path)
        for line in path.read_text(encoding="utf-8").splitlines():
            fields = json.loads(line)
            # Runs of earlier versions have records that no report uses.
            if (kind := cls._KINDS.get(fields.pop("record"))) is not None:
                log.records.append(kind(**fields))
        return log

    def of(self, kind: type[RecordT], **fields: object) -> list[RecordT]:
        """Return the undisturbed records of `kind` with these field values, in order."""
        records = self.all_of(kind, **fields)
        return [r for r in records if getattr(r, "other_busy_cores", 0.0) <= DISTURBED_CORES]

    def all_of(self, kind: type[RecordT], **fields: object) -> list[RecordT]:
        """Return the records of `kind` with these field values, in order."""
        return [
            record
            for record in self.records
            if isinstance(record, kind)
            and all(getattr(record, name) == value for name, value in fields.items())
        ]

    def work(self, model: str) -> ModelWork:
        """Return the work of a model of this run."""
        return ModelWork(**self.of(ModelRecord, model=model)[0].work)

    def limits(self, model: str, round_number: int, part: str) -> Limits | None:
        """Return the limits of a round; None if they were not measured, or always disturbed."""
        found = self.of(LimitsRecord, model=model, round=round_number, part=part)
        return found[-1].limits if found else None


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
