"""How often steps of each size ran, kept in a file over restarts: what the tuner works from.

One file per model and device. Several servers may share it: each adds what it counted since its
last visit, under a lock, and replaces the file in one go. Invariant: a file that cannot be read
is set aside and begun anew; nothing here ever fails a server.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FORMAT = 1
PHASES = ("prefill", "decode")


@dataclass(slots=True)
class PhaseUsage:
    """Steps of one phase: by their real size, and by the bucket that they ran in.

    Sizes are tokens in prefill and rows in decode.
    """

    steps_by_size: dict[int, int] = field(default_factory=dict)
    steps_by_bucket: dict[int, int] = field(default_factory=dict)
    seconds_by_bucket: dict[int, float] = field(default_factory=dict)

    def note(self, size: int, bucket: int, seconds: float) -> None:
        """Count one step."""
        self.steps_by_size[size] = self.steps_by_size.get(size, 0) + 1
        self.steps_by_bucket[bucket] = self.steps_by_bucket.get(bucket, 0) + 1
        self.seconds_by_bucket[bucket] = self.seconds_by_bucket.get(bucket, 0.0) + seconds

    def add(self, other: PhaseUsage) -> None:
        """Add what another one counted."""
        _add(self.steps_by_size, other.steps_by_size)
        _add(self.steps_by_bucket, other.steps_by_bucket)
        _add(self.seconds_by_bucket, other.seconds_by_bucket)

    def fitting(self, largest: int) -> dict[int, int]:
        """Return the steps by size without larger sizes, which another engine allowed."""
        return {size: steps for size, steps in self.steps_by_size.items() if size <= largest}

    def mean_seconds(self) -> dict[int, float]:
        """Return the mean seconds of a step, by bucket."""
        return {
            bucket: self.seconds_by_bucket[bucket] / steps
            for bucket, steps in self.steps_by_bucket.items()
            if steps > 0
        }


@dataclass(slots=True)
class Usage:
    """Steps by phase; `about` says of what: see `about_engine`."""

    phases: dict[str, PhaseUsage] = field(
        default_factory=lambda: {phase: PhaseUsage() for phase in PHASES}
    )
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How many steps were counted."""
        return sum(sum(usage.steps_by_size.values()) for usage in self.phases.values())

    def add(self, other: Usage) -> None:
        """Add what another one counted; what it is about is the newer of the two."""
        self.about = other.about or self.about
        for phase, usage in other.phases.items():
            self.phases[phase].add(usage)

    def to_json(self) -> dict[str, Any]:
        """Return the file's content."""
        return {
            "format": _FORMAT,
            "about": self.about,
            **{
                phase: {
                    "steps_by_size": usage.steps_by_size,
                    "steps_by_bucket": usage.steps_by_bucket,
                    "seconds_by_bucket": usage.seconds_by_bucket,
                }
                for phase, usage in self.phases.items()
            },
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Usage:
        """Read a file's content. Raises `ValueError` for anything that is not one."""
        try:
            if content["format"] != _FORMAT:
                raise ValueError(f"format is {content['format']}, not {_FORMAT}")
            phases = {phase: _phase(content[phase]) for phase in PHASES}
            return cls(phases, dict(content["about"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a record of bucket use: {error!r}") from error


def about_engine(
    model: str, device: str, *, decode_buckets: Sequence[int], prefill_buckets: Sequence[int]
) -> dict[str, Any]:
    """Return what a record is about: the served model, its device and its present buckets."""
    return {
        "model": model,
        "device": device,
        "decode_buckets": list(decode_buckets),
        "prefill_buckets": list(prefill_buckets),
    }


class UsageFile:
    """The file of one model and device."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Usage:
        """Return what is recorded, nothing without a file. Raises `ValueError` or `OSError`."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return Usage()
        return Usage.from_json(json.loads(text))

    def add(self, counted: Usage) -> None:
        """Add to the file. Raises `OSError` where it cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            try:
                total = self.read()
            except ValueError:
                self.path.replace(self.path.with_suffix(".damaged"))
                total = Usage()
            total.add(counted)
            temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(total.to_json(), file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _phase(content: Mapping[str, Mapping[str, Any]]) -> PhaseUsage:
    return PhaseUsage(
        {int(size): int(steps) for size, steps in content["steps_by_size"].items()},
        {int(bucket): int(steps) for bucket, steps in content["steps_by_bucket"].items()},
        {int(bucket): float(time) for bucket, time in content["seconds_by_bucket"].items()},
    )


def _add(into: dict[int, Any], more: Mapping[int, Any]) -> None:
    for key, value in more.items():
        into[key] = into.get(key, 0) + value
