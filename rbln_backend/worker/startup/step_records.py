"""Records of step sizes, which one rank keeps: all ranks run the same sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.compiler.port import Compiler
from rbln_backend.config import RblnConfig
from rbln_backend.core import Phase
from rbln_backend.reporting.batch_size_log import BatchSizeLog
from rbln_backend.vllm_compat.surface import VllmConfig, configured
from rbln_backend.worker.startup.cache_fields import cache_fields
from rbln_backend.worker.step.group_inputs import KvGroup
from rbln_backend.worker.step.usage_recorder import UsageRecorder, open_recorder


def open_usage(
    config: VllmConfig,
    compiler: Compiler,
    groups: Sequence[KvGroup],
    tables: Mapping[Phase, BucketTable],
) -> UsageRecorder | None:
    """Return the recorder of the engine's file, None where nothing is to be written."""
    rbln = configured(config)
    if rbln.cache_read_only:
        return None
    root = Path(rbln.cache_root) / "rbln" / "usage"
    threads = rbln.num_threads or len(os.sched_getaffinity(0))
    device = {**compiler.fingerprint(), "device": compiler.hardware, "threads": threads}
    fields = cache_fields(config, rbln, groups)
    return open_recorder(root, config.model_config, fields, device, tables)


def open_size_log(rbln: RblnConfig) -> BatchSizeLog | None:
    """Return the log of batch sizes, None without an interval."""
    interval_s = rbln.log_batchsize_interval
    return BatchSizeLog(interval_s) if interval_s >= 0 else None
