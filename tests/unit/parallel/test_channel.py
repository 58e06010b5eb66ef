"""Two ranks of one host: sums through shared memory, through torch, and as an SDK gets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel_cache import share_kernels

SCRIPT = Path(__file__).parent / "channel_ranks.py"


@pytest.mark.slow
def test_ranks_agree_over_shared_memory_and_gloo(tmp_path: Path) -> None:
    kernels = share_kernels(tmp_path / "cache")
    command = [sys.executable, str(SCRIPT)]
    rest = [str(tmp_path / "meeting"), str(kernels)]
    path = os.pathsep.join(filter(None, (str(SCRIPT.parents[3]), os.environ.get("PYTHONPATH"))))
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *rest],
            env=dict(os.environ) | {"PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        logs = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(logs)[-3000:]
