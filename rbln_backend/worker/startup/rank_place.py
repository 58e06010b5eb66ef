"""Where vLLM has placed a rank, in the words of `rbln_backend.reporting.ranks`."""

from __future__ import annotations

from rbln_backend.reporting.ranks import RankPlace
from rbln_backend.vllm_compat.surface import VllmConfig, settled


def rank_place(config: VllmConfig, rank: int, local_rank: int) -> RankPlace:
    """The place of ``rank`` of the engine that ``config`` belongs to."""
    parallel = config.parallel_config
    # Ray tells a rank which devices of its host the engine has, one for each of its ranks there.
    local = len(parallel.assigned_physical_gpu_ids or ()) or parallel.local_world_size
    return RankPlace(
        engine=parallel.data_parallel_index,
        rank=rank,
        ranks=parallel.world_size,
        tensor_ranks=parallel.tensor_parallel_size,
        local_number=(parallel.data_parallel_rank_local or 0) * local + local_rank,
        local_ranks=local * settled(config).local_engines,
    )
