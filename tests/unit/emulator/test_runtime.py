"""Host resources that a rank takes, and their report."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from rbln_backend.config import RblnConfig
from rbln_backend.emulator.memory import choose_memory
from rbln_backend.errors import ConfigError
from rbln_backend.host.cores import core_budget, format_cores
from rbln_backend.worker.startup.emulated_device import set_up_runtime


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    mask = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, mask)
    choose_memory(mapped=False, huge_pages=False)


def test_by_default_the_rank_takes_its_cores_and_is_not_bound_to_them() -> None:
    mask = os.sched_getaffinity(0)
    info = set_up_runtime(RblnConfig(), 0, 1)
    budget = core_budget(mask)
    assert (info.threads, info.cores) == (budget.threads(0, 1), list(budget.cores))
    assert (info.thread_affinity, info.allocator) == ("none", "mapped")
    assert os.sched_getaffinity(0) == mask


def test_chosen_processors_bind_the_engine_and_count_its_threads() -> None:
    last = max(os.sched_getaffinity(0))
    info = set_up_runtime(RblnConfig(thread_affinity=str(last)), 0, 1)
    assert (info.threads, info.cores) == (1, [last])
    assert os.sched_getaffinity(0) == {last}


def test_more_threads_than_chosen_processors_are_refused_before_anything_changes() -> None:
    mask = os.sched_getaffinity(0)
    first = format_cores({min(mask)})
    with pytest.raises(ConfigError) as caught:
        set_up_runtime(RblnConfig(thread_affinity=first, num_threads=5), 0, 1)
    assert str(caught.value) == (
        f"num_threads=5 exceeds the cores that thread_affinity='{first}' leaves a rank: 1"
    )
    assert os.sched_getaffinity(0) == mask


def test_torchs_own_memory_is_left_on_request() -> None:
    info = set_up_runtime(RblnConfig(allocator="system", huge_pages="off"), 0, 1)
    assert (info.allocator, info.allocator_reason) == ("system", "requested")
    assert (info.huge_pages, info.huge_pages_reason) == ("off", "requested")
    assert torch.empty(3 << 20, dtype=torch.uint8).data_ptr() % (2 << 20) != 0
