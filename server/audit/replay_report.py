"""Report of a replay: the state of the chain, what computes here, and each answer's result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from server.audit.verification import ChainCheck, LogPlace

_SHOWN = 100
"""Number of answers that differ, or are not replayed, up to which each is printed."""


class LoggedAnswer(NamedTuple):
    """An answer's place and record, and the header of its file."""

    place: LogPlace
    record: Mapping[str, Any]
    header: Mapping[str, Any]


@dataclass
class ReplayReport:
    """Result of a replay, as `--json` prints it."""

    files: int
    records: int = 0
    gaps: int = 0
    first: int | None = None
    last: int = -1
    head: str = ""
    broken: list[dict[str, Any]] = field(default_factory=list)
    engine: list[dict[str, Any]] = field(default_factory=list)
    same: int = 0
    different: list[dict[str, Any]] = field(default_factory=list)
    not_replayed: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """True if chain and weights are as recorded, and each answer has the same tokens."""
        other_weights = any(entry["field"] == "weights" for entry in self.engine)
        return not (self.broken or self.different or self.not_replayed or other_weights)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report as text."""
        yield (
            f"audit log: {self.records} records in {self.files} files, {self.first} to "
            f"{self.last}; the last hash is {self.head}"
        )
        for found in self.broken:
            yield f"broken: {found['file']}, line {found['line']}: {found['problem']}"
        yield "the chain is broken" if self.broken else "the chain is whole"
        if self.gaps:
            yield f"{self.gaps} answers have no record: it could not be written"
        for entry in self.engine:
            yield f"{entry['field']}: {_difference(entry['recorded'], entry['here'])}"
        for found in self.different[:_SHOWN]:
            yield _answer_line(found)
        for found in self.not_replayed[:_SHOWN]:
            yield f"not replayed: {_place(found)}: {found['reason']}"

    def summary(self) -> str:
        """Return the line with the number of answers by result."""
        return (
            f"{self.same + len(self.different)} answers replayed: {self.same} have the same "
            f"tokens, {len(self.different)} differ; {len(self.not_replayed)} not replayed"
        )


def verified(files: Sequence[Path]) -> ReplayReport:
    """Return the report of a log's chain."""
    verification = ChainCheck(files)
    for _ in verification.records():
        pass
    return ReplayReport(
        files=len(files),
        records=verification.num_records,
        gaps=verification.num_gaps,
        first=verification.first,
        last=verification.link.seq - 1,
        head=verification.link.head,
        broken=[
            {"file": str(b.place.file), "line": b.place.line, "problem": b.problem}
            for b in verification.breaks
        ],
    )


def chosen_answers(files: Sequence[Path], chosen: frozenset[int]) -> Iterator[LoggedAnswer]:
    """Yield the answers whose records have the `chosen` numbers; none chosen: all."""
    header: dict[str, Any] = {}
    for place, record in ChainCheck(files).records():
        if record["kind"] == "server":
            header = record
        elif record["kind"] == "answer" and (not chosen or record["seq"] in chosen):
            yield LoggedAnswer(place, record, header)


def _place(found: Mapping[str, Any]) -> str:
    return f"{found['file']}, line {found['line']} (record {found['seq']})"


def _answer_line(found: Mapping[str, Any]) -> str:
    replayed = "no token" if found["replayed"] is None else _token(found["replayed"])
    return (
        f"differs: {_place(found)}, answer {found['answer_id']}: token {found['position'] + 1} of "
        f"{found['tokens']}: recorded {_token(found['recorded'])}, here {replayed}"
    )


def _token(token: Mapping[str, Any]) -> str:
    logprob = "unknown" if token["logprob"] is None else f"{token['logprob']:.4f}"
    return f"{token['id']} {token['text']!r} (log-probability {logprob})"


def _difference(recorded: object, here: object) -> str:
    """Return what differs between two values, of mappings the entries alone."""
    if not (isinstance(recorded, Mapping) and isinstance(here, Mapping)):
        return f"recorded {recorded}, here {here}"
    names = sorted({*recorded, *here})
    differing = [n for n in names if recorded.get(n) != here.get(n)]
    shown = ", ".join(f"{n} {recorded.get(n)} -> {here.get(n)}" for n in differing[:3])
    more = len(differing) - 3
    return f"recorded -> here: {shown}" + (f" and {more} more" if more > 0 else "")
