"""Numbers of ranks: unique in a service, and what each of them is there for."""

from __future__ import annotations

import pytest
from vllm.config import ParallelConfig, VllmConfig

from rbln_backend.config import RblnConfig
from rbln_backend.settings import Settled
from rbln_backend.worker.ranks import rank_place


def config(engine: int = 0, *, engines: int = 1, **sizes: int) -> VllmConfig:
    made = VllmConfig(parallel_config=ParallelConfig(**sizes))
    made.parallel_config.data_parallel_index = engine
    made.parallel_config.data_parallel_rank_local = engine
    made.additional_config = Settled(RblnConfig(), engines, {})
    return made


def test_rank_numbers_and_local_numbers_are_unique() -> None:
    places = [
        rank_place(config(engine, engines=2, tensor_parallel_size=2), rank, rank)
        for engine in range(2)
        for rank in range(2)
    ]
    assert [place.number for place in places] == [0, 1, 2, 3]
    assert [place.local_number for place in places] == [0, 1, 2, 3]
    assert {place.local_ranks for place in places} == {4}
    assert [place.counts_steps for place in places] == [True, False, True, False]


@pytest.mark.parametrize(("tensor", "stages", "replying"), [(1, 1, 0), (2, 1, 0), (2, 2, 2)])
def test_the_first_rank_of_the_last_stage_replies(tensor: int, stages: int, replying: int) -> None:
    sizes = config(tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    places = [rank_place(sizes, rank, rank) for rank in range(tensor * stages)]
    assert [place.replies for place in places].index(True) == replying
    assert sum(place.replies for place in places) == 1


def test_ray_sets_the_number_of_ranks_on_a_host() -> None:
    sizes = config(tensor_parallel_size=4)
    sizes.parallel_config.assigned_physical_gpu_ids = [0, 1]
    place = rank_place(sizes, 3, 1)
    assert (place.number, place.local_number, place.local_ranks) == (3, 1, 2)


def test_named_devices_are_no_ranks() -> None:
    sizes = config(tensor_parallel_size=2)
    sizes.parallel_config.assigned_physical_gpu_ids = [4, 5, 6, 7]
    assert rank_place(sizes, 1, 1).local_ranks == 2
