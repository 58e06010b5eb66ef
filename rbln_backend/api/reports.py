"""Files that engines write about themselves: progress, descriptions, metrics and start times."""

from __future__ import annotations

from rbln_backend.reporting.computed_rows import computed_rows
from rbln_backend.reporting.declared_metrics import MetricDecl
from rbln_backend.reporting.description import SECTIONS, read_descriptions
from rbln_backend.reporting.last_start import LastStart
from rbln_backend.reporting.model_report import ModelReport
from rbln_backend.reporting.progress import GraphProgress, ProgressReader, ProgressSnapshot
from rbln_backend.reporting.store_report import CompileReport, StoreReport
