"""Which divisions of experts among ranks can run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rbln_backend.unsupported import (
    DATA_PARALLEL_STAGES,
    EXPERT_EXCHANGE,
    EXPERT_PARALLEL_TP_DP,
)

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

logger = logging.getLogger(__name__)


def check_expert_ranks(parallel: ParallelConfig) -> None:
    """For a mixture of experts. Raises ``UnsupportedModelError`` for what its layers cannot do."""
    tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
    splits = parallel.enable_expert_parallel
    refused = {
        EXPERT_EXCHANGE: parallel.all2all_backend != "allgather_reducescatter",
        EXPERT_PARALLEL_TP_DP: splits and tensor > 1 and data > 1,
        DATA_PARALLEL_STAGES: data > 1 and parallel.pipeline_parallel_size > 1,
    }
    for feature, is_asked in refused.items():
        if is_asked:
            raise feature.refusal()
    if splits and tensor * data == 1:
        logger.warning("--enable-expert-parallel has no effect: one rank has all experts")
