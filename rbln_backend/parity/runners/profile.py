"""``--profile``: Chrome trace of a side's generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rbln_backend.parity.job import Job


@contextmanager
def profiled(job: Job) -> Iterator[None]:
    """Write ``trace.json`` into the job's profile folder, if it has one.

    For an engine with several ranks it covers the driving process.
    """
    if job.profile_dir is None:
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
    folder = Path(job.profile_dir)
    folder.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(folder / "trace.json"))
