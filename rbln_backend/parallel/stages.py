"""What one stage of a pipeline takes: each has a step under way, and its share of the requests."""

from __future__ import annotations

from rbln_backend.bucketing.table import BucketTable, decode_bucket_table
from rbln_backend.vllm_compat.surface import VllmConfig, configured


def largest_decode(config: VllmConfig) -> int:
    """Requests of the largest decode step."""
    stages = config.parallel_config.pipeline_parallel_size
    return config.scheduler_config.max_num_seqs // stages


def decode_buckets(config: VllmConfig) -> BucketTable | None:
    """Sizes of decode graphs; None for models that pool. Raises ``BucketError``."""
    if config.model_config.runner_type == "pooling":
        return None
    return decode_bucket_table(configured(config), largest_decode(config))
