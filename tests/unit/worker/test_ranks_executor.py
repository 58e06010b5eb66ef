"""The scheduler of an engine of several ranks takes new sizes when all ranks have swapped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from rbln_backend.bucketing.engine_buckets import EngineBuckets
from rbln_backend.bucketing.table import BucketTable
from rbln_backend.config import RblnConfig
from rbln_backend.vllm_compat.settled import Settled
from rbln_backend.worker.ranks_executor import RanksExecutor

OLD = EngineBuckets(BucketTable((16, 64)), BucketTable((1, 2, 4)))


@pytest.mark.parametrize("behind", [False, True])
def test_sizes_reach_the_scheduler_once_no_rank_is_behind(
    monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    done = {"phase": "done", "decode": [1, 4], "prefill": [24, 64]}
    results = [done, done | {"phase": "run"} if behind else done]

    def answer(*_: Any, **__: Any) -> list[dict[str, Any]]:
        return results

    monkeypatch.setattr(MultiprocExecutor, "collective_rpc", answer)
    config = Settled(RblnConfig(), 1, {}, OLD)
    taken: list[EngineBuckets] = []
    config.size_changes.follow(taken.append)
    executor = RanksExecutor.__new__(RanksExecutor)
    executor.vllm_config = SimpleNamespace(additional_config=config)  # type: ignore[assignment]
    assert executor.collective_rpc("advance_bucket_change", args=("run",)) == results
    expected = EngineBuckets(BucketTable((24, 64)), BucketTable((1, 4)))
    assert taken == ([] if behind else [expected])
