"""Two engines that start at once over one empty store compile each graph once between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.engine.conftest import DEFAULTS
from tests.kernel_cache import share_kernels

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
        command = [sys.executable, str(script), json.dumps([str(checkpoints("llama")), options])]
        processes.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        )
    for process in processes:
        _, stderr = process.communicate(timeout=180)
        assert process.returncode == 0, stderr[-2000:]
    results = [result for number in range(2) for result in _results(tmp_path / f"run-{number}")]
    assert sorted(results) == ["compiled"] * 7 + ["loaded"] * 7


def _results(run_dir: Path) -> list[str]:
    """Return "compiled" or "loaded" by graph, from the progress file of rank 0."""
    lines = (run_dir / "progress-0.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event["result"] for event in events if event["event"] == "graph_done"]
