"""Step sizes of one pipeline stage: each stage runs a step of its share of the requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rbln_backend.vllm_compat.surface import VllmConfig


def largest_decode(config: VllmConfig) -> int:
    """Return the requests of the largest decode step."""
    stages = config.parallel_config.pipeline_parallel_size
    return config.scheduler_config.max_num_seqs // stages
