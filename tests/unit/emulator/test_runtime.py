"""Host resources that a rank takes, and their report."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rbln_backend.config import RblnConfig
from rbln_backend.devices.emulated.memory import choose_memory
from rbln_backend.host.resources import core_budget
from rbln_backend.worker.worker import set_up_runtime


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    choose_memory(mapped=False, huge_pages=False)


def test_by_default_the_rank_takes_its_cores_and_is_not_bound_to_them() -> None:
    mask = os.sched_getaffinity(0)
    info = set_up_runtime(RblnConfig(), 0, 1)
    budget = core_budget(mask)
    assert (info.threads, info.cores) == (budget.threads(0, 1), list(budget.cores))
    assert info.allocator == "mapped"
    assert os.sched_getaffinity(0) == mask
