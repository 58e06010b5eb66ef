"""Checks of configurations with several ranks, before any rank exists."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from rbln_backend.errors import ConfigError
from rbln_backend.unsupported import (
    EXPERTS_APART,
    HOSTS,
    LORA_EXPERTS_APART,
    LORA_SHARDS,
    MICRO_BATCHES,
    OWN_LAUNCHER,
)

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

logger = logging.getLogger(__name__)

RANKS_EXECUTOR = "rbln_backend.worker.executor.RanksExecutor"
"""The executor of several ranks on one host."""

_WHOLE_ROWS: Final = "flashinfer_nvlink_two_sided"
"""The all-to-all backend with which vLLM gives every tensor-parallel rank all rows of a batch."""


def is_parallel(parallel: ParallelConfig) -> bool:
    """Return True for several ranks, and where the vendor's checks for several ranks apply."""
    several = parallel.world_size > 1 or parallel.data_parallel_size > 1
    return several or parallel.enable_expert_parallel


def check_ranks(config: VllmConfig, *, profiler: bool) -> None:
    """Raise ``UnsupportedModelError``, ``ConfigError`` or ``RuntimeError`` if it cannot run.

    The text for ``profiler`` is the one that the vendor documents.
    """
    parallel = config.parallel_config
    if is_parallel(parallel) and profiler:
        raise RuntimeError(
            "RBLN_PROFILER is not supported when using vLLM model parallel (TP, DP, EP, or PP)."
        )
    lora = config.lora_config
    refusals = {
        OWN_LAUNCHER: parallel.distributed_executor_backend == "external_launcher",
        HOSTS: _spans_hosts(parallel),
        EXPERTS_APART: _lacks_engines(parallel) and config.model_config.is_moe,
        MICRO_BATCHES: parallel.use_ubatching,
        LORA_SHARDS: lora is not None and lora.fully_sharded_loras,
        LORA_EXPERTS_APART: lora is not None
        and parallel.data_parallel_size > 1
        and "experts" in (lora.target_modules or ()),
    }
    for feature, is_present in refusals.items():
        if is_present:
            raise feature.refusal()
    _check_stages(config)


def _spans_hosts(parallel: ParallelConfig) -> bool:
    """Return True if the engine would wait for processes that neither we nor `--headless` start."""
    return (
        parallel.nnodes > 1
        or parallel.local_engines_only
        or parallel.data_parallel_backend == "ray"
        or (_lacks_engines(parallel) and parallel.data_parallel_size_local < 1)
    )


def _lacks_engines(parallel: ParallelConfig) -> bool:
    """Return True for fewer local engines than data-parallel ranks, unless the user sets a rank."""
    has_rank = parallel.data_parallel_rank_local is not None
    return not has_rank and parallel.data_parallel_size_local < parallel.data_parallel_size


def _check_stages(config: VllmConfig) -> None:
    stages = config.parallel_config.pipeline_parallel_size
    number = config.scheduler_config.max_num_seqs
    if number < stages:
        raise ConfigError(
            f"--max-num-seqs {number} is below --pipeline-parallel-size {stages}: every stage has "
            f"a step of max_num_seqs // stages requests; give at least {stages}"
        )
    if number % stages:
        logger.warning(
            "--max-num-seqs %d is no multiple of the %d pipeline stages: a step takes at most %d "
            "requests, so %d of them never run together with the others",
            *(number, stages, number // stages, number % stages),
        )


def settle_parallel(parallel: ParallelConfig) -> None:
    """Set the executors of one process and of one host, and what ranks exchange."""
    if parallel.distributed_executor_backend == "uni":
        parallel.distributed_executor_backend = "rbln_backend.worker.executor.DirectExecutor"
    elif parallel.distributed_executor_backend == "mp":
        parallel.distributed_executor_backend = RANKS_EXECUTOR
    parallel.disable_custom_all_reduce = True
    _keep_rows_whole(parallel)


def _keep_rows_whole(parallel: ParallelConfig) -> None:
    """Give all rows to each tensor-parallel rank that shares experts with other engines.

    vLLM would split the rows among the ranks: less to gather, but batch sizes that depend on the
    number of ranks. The backend's name has no other effect here: our layers do the exchange.
    """
    if parallel.use_sequence_parallel_moe:
        parallel.all2all_backend = _WHOLE_ROWS
