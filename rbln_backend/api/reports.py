"""Files that engines write about themselves: progress, descriptions, metrics and start times."""

from __future__ import annotations

from rbln_backend.reports.info import (
    SECTIONS,
    CompileReport,
    ModelReport,
    StoreReport,
    read_descriptions,
)
from rbln_backend.reports.metrics import MetricDecl, computed_rows
from rbln_backend.reports.progress import (
    GraphProgress,
    LastStart,
    ProgressReader,
    ProgressSnapshot,
)
