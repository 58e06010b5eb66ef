"""Where a rank stands among all ranks of a service, and what follows from it for its host."""

from __future__ import annotations

from dataclasses import dataclass

from rbln_backend.cores import LOCAL_ENGINES
from rbln_backend.vllm_compat.surface import VllmConfig


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Numbers of one rank; engines of a data-parallel service are counted through."""

    number: int
    """Unique among the ranks of all engines: names of files in the run directory."""
    engine: int
    """The data-parallel engine that it belongs to."""
    local_number: int
    """Its place among the ranks of all engines on this host."""
    local_ranks: int
    """The ranks of all engines on this host."""
    replies: bool
    """Whether the executor waits for this rank's results; the others are never heard."""
    counts_steps: bool
    """Whether it counts steps: one rank per engine does, all run the same."""


def rank_place(config: VllmConfig, rank: int, local_rank: int) -> RankPlace:
    """The place of ``rank`` of the engine that ``config`` belongs to."""
    parallel, additional = config.parallel_config, config.additional_config
    assert isinstance(additional, dict)
    engine = parallel.data_parallel_index
    # Ray tells a rank which devices of its host the engine has, one for each of its ranks there.
    local = len(parallel.assigned_physical_gpu_ids or ()) or parallel.local_world_size
    return RankPlace(
        number=engine * parallel.world_size + rank,
        engine=engine,
        local_number=(parallel.data_parallel_rank_local or 0) * local + local_rank,
        local_ranks=local * int(additional.get(LOCAL_ENGINES, 1)),
        replies=rank == parallel.world_size - parallel.tensor_parallel_size,
        counts_steps=rank == 0,
    )
