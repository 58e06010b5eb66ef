"""Ranks that Ray places on the nodes of a cluster, two nodes of which are on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Engines
from tests.engine.parallel_runs import assert_as_one_rank, run_ranks
from tests.engine.test_equality import make_prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.wide]

CLUSTER = Path(__file__).parent / "ray_cluster.py"
PROMPTS = make_prompts([1, 65, 130], seed=510)
RAY: dict[str, Any] = {"distributed_executor_backend": "ray"}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster whose two nodes have one device each."""
    pytest.importorskip("ray", reason="requirements/ray.txt is not installed")
    with subprocess.Popen(
        [sys.executable, str(CLUSTER), "1", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # Ray makes its workers nice; they would wait for everything else on this machine.
        env=dict(os.environ) | {"RAY_worker_niceness": "0"},
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        line = next(line for line in process.stdout if line.startswith("ADDRESS "))
        yield line.split()[1]
        process.stdin.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_on_two_nodes(
    engines: Engines, tmp_path: Path, address: str, options: dict[str, Any]
) -> None:
    engine = engines("llama")
    answers = run_ranks(
        *(engine.checkpoint, tmp_path, PROMPTS),
        environment={"RAY_ADDRESS": address, "RAY_USAGE_STATS_ENABLED": "0"},
        **RAY,
        **options,
    )
    assert_as_one_rank(engine, PROMPTS, answers, 1e-4)
