"""Files that engines write about themselves: progress, descriptions, metrics and start times."""

from __future__ import annotations

from rbln_backend.reporting.batch_size_log import computed_rows
from rbln_backend.reporting.metrics import MetricDecl
from rbln_backend.reporting.progress import (
    GraphProgress,
    LastStart,
    ProgressReader,
    ProgressSnapshot,
)
from rbln_backend.reporting.reports import (
    SECTIONS,
    CompileReport,
    ModelReport,
    StoreReport,
    read_descriptions,
)
