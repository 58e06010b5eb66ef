"""Step sizes of one pipeline stage: each stage runs a step of its share of the requests."""

from __future__ import annotations

from rbln_backend.bucketing.table import BucketTable, decode_bucket_table
from rbln_backend.bucketing.verify import NO_DRAFTS, VerifyTable, draft_lengths
from rbln_backend.vllm_compat.surface import VllmConfig, configured


def largest_decode(config: VllmConfig) -> int:
    """Return the requests of the largest decode step."""
    stages = config.parallel_config.pipeline_parallel_size
    return config.scheduler_config.max_num_seqs // stages


def decode_buckets(config: VllmConfig) -> BucketTable | None:
    """Return the sizes of decode graphs, None for pooling models. Raises ``BucketError``."""
    if config.model_config.runner_type == "pooling":
        return None
    return decode_bucket_table(configured(config), largest_decode(config))


def verify_table(config: VllmConfig) -> VerifyTable:
    """Return the sizes of steps that check drafts. Raises ``BucketError``."""
    speculation, buckets = config.speculative_config, decode_buckets(config)
    if speculation is None or buckets is None:
        return NO_DRAFTS
    rbln = configured(config)
    lengths = draft_lengths(rbln.verify_lengths, speculation.num_speculative_tokens)
    # vLLM's scheduler gives no step more tokens than a chunk has.
    tokens = min(rbln.verify_tokens, config.scheduler_config.max_num_batched_tokens)
    return VerifyTable(buckets, lengths, tokens)
