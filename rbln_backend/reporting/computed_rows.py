"""Rows that engines computed for requests, read from the metric files of a run directory."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict

_KEY = '["rbln_bucket_useful_rows"'
"""Prefix of this counter's keys. It does not count steps that are only padding."""


def computed_rows(run_dir: Path, engines: int) -> float | None:
    """Return the rows of requests in all steps so far.

    None if fewer than ``engines`` engines have files on this host: the others may compute.
    """
    boards: list[float] = []
    for path in (run_dir / "metrics").glob("counter_*.db"):
        values = MmapedDict.read_all_values_from_file(str(path))  # type: ignore[no-untyped-call]
        if rows := [value for key, value, *_ in values if key.startswith(_KEY)]:
            boards.append(sum(rows))
    return sum(boards) if len(boards) >= engines else None
