"""Two engines that start at once over one empty store compile each graph once between them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.engine.conftest import DEFAULTS
from tests.kernel_cache import share_kernels
from tests.warm_process import warm_process

pytestmark = [pytest.mark.engine, pytest.mark.slow]

START = """
import json, sys
from vllm import LLM

path, options = json.loads(sys.argv[1])
LLM(path, **options)
"""


def test_two_starts_share_the_work(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    root = share_kernels(tmp_path / "cache")
    script = tmp_path / "start.py"
    script.write_text(START)
    environment = dict(os.environ) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    processes = []
    for number in range(2):
        run_dir = tmp_path / f"run-{number}"
        run_dir.mkdir()
        rbln = {"cache_root": str(root), "run_dir": str(run_dir), "num_threads": 1}
        options = DEFAULTS | {"additional_config": {"rbln": rbln}}
        argument = json.dumps([str(checkpoints("llama")), options])
        with (run_dir / "log").open("wb") as log:
            process = warm_process().start(
                argument, environ=environment, output=log, errors=log, script=script
            )
        processes.append((process, run_dir / "log"))
    for process, log_file in processes:
        assert process.wait(180) == 0, log_file.read_text()[-2000:]
    results = [result for number in range(2) for result in _results(tmp_path / f"run-{number}")]
    assert sorted(results) == ["compiled"] * 7 + ["loaded"] * 7


def _results(run_dir: Path) -> list[str]:
    """Return "compiled" or "loaded" by graph, from the progress file of rank 0."""
    lines = (run_dir / "progress-0.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event["result"] for event in events if event["event"] == "graph_done"]
