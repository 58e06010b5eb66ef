"""What a replay is asked to run and what it measured; both travel as files between processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a round: it comes before step `step`; a wait for it counts as steps."""

    step: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that run until all are done, in the buckets `sizes` by phase alone."""

    requests: tuple[Request, ...]
    sizes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Step:
    """One step that ran: `size` tokens of a chunk or rows of a batch, in `seconds` of wall time."""

    phase: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """`argv` are MODEL and vLLM's flags; a round begins when the one before has ended."""

    argv: tuple[str, ...]
    rounds: tuple[Round, ...]

    def write(self, path: Path) -> None:
        """Write the job."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ReplayJob:
        """Read what `write` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        rounds = tuple(_round(one) for one in fields["rounds"])
        return cls(argv=tuple(fields["argv"]), rounds=rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The steps of each round, and what the engine said of itself."""

    rounds: tuple[tuple[Step, ...], ...]
    about: dict[str, Any]

    def write(self, path: Path) -> None:
        """Write the result, whole or not at all."""
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(asdict(self)), encoding="utf-8")
        aside.replace(path)

    @classmethod
    def read(cls, path: Path) -> ReplayResult:
        """Read what `write` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        rounds = tuple(tuple(Step(**one) for one in steps) for steps in fields["rounds"])
        return cls(rounds=rounds, about=fields["about"])


def _round(fields: dict[str, Any]) -> Round:
    requests = tuple(Request(**one) for one in fields["requests"])
    return Round(requests, {phase: tuple(sizes) for phase, sizes in fields["sizes"].items()})
