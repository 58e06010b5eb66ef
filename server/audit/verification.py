"""Verification of an audit log: every line's hash and its place in the chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from server.audit.chain import NO_HASH, ChainError, Link, check_follows, read_line
from server.audit.log_files import AuditLogError, log_files


class LogPlace(NamedTuple):
    """A line of a file, the first is 1."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


class Break(NamedTuple):
    """A place where the chain is broken, and how."""

    place: LogPlace
    problem: str


@dataclass
class ChainCheck:
    """Reads the records of files in order and lists where their chain is broken.

    `first` is the number of the first record, `link` the position after the last one. The chain
    goes on after a break, so that each is listed once.
    """

    files: Sequence[Path]
    breaks: list[Break] = field(default_factory=list)
    num_records: int = 0
    num_gaps: int = 0
    """Records that were dropped, as `gap` records say."""
    first: int | None = None
    link: Link = field(default_factory=Link)
    _follows_damage: bool = False
    """True if the line before had no valid record, so that the next one has none to follow."""

    def records(self) -> Iterator[tuple[LogPlace, dict[str, Any]]]:
        """Yield the records whose lines have their hash; `breaks` is complete at the end."""
        for path in self.files:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    place = LogPlace(path, number)
                    record = self._read(place, line)
                    if record is not None:
                        yield place, record

    def _read(self, place: LogPlace, line: bytes) -> dict[str, Any] | None:
        try:
            if not line.endswith(b"\n"):
                raise ChainError("it is torn: it has no newline")
            record, after = read_line(line[:-1])
        except ChainError as error:
            self.breaks.append(Break(place, str(error)))
            self._follows_damage = True
            return None
        try:
            self._check(record)
        except ChainError as error:
            self.breaks.append(Break(place, str(error)))
        self.num_records += 1
        self.link, self._follows_damage = after, False
        if record["kind"] == "gap":
            self.num_gaps += int(record["dropped"])
        return record

    def _check(self, record: dict[str, Any]) -> None:
        if self.first is None:
            self.first = record["seq"]
            if not self.first and record.get("prev") != NO_HASH:
                raise ChainError("it is record 0 and follows another one")
        elif not self._follows_damage:
            check_follows(record, self.link)


def files_of(path: Path) -> list[Path]:
    """Return the files of a log's directory, or the file itself. Raises `AuditLogError`."""
    if path.is_file():
        return [path]
    if found := log_files(path):
        return found
    if folders := sorted(one.name for one in path.glob("*") if log_files(one)):
        raise AuditLogError(
            f"{path} has a log for each process; name one of them: {', '.join(folders)}"
        )
    raise AuditLogError(f"{path} is no audit log: it has no audit-*.jsonl files")
