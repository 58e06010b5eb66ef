"""Runs a side in a process of its own, in a clean environment, and shows its progress."""

from __future__ import annotations

from collections.abc import Mapping

from rbln_backend.parity.job import Job, SideResult
from rbln_backend.reporting.child_process import ChildJob


def run_side(job: Job, environ: Mapping[str, str], timeout: float) -> SideResult:
    """Run ``job``; raises ``ChildError`` with the end of its log if it fails or takes too long."""
    child = ChildJob(
        label=f"{job.side} side",
        module="rbln_backend.parity.child",
        variables=environ,
        timeout=timeout,
    )
    return child.run(job.write, SideResult.read)
