"""Two ranks of one host: sums through shared memory, through torch, and as an SDK gets them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kernel_cache import share_kernels
from tests.warm_process import warm_process

SCRIPT = Path(__file__).parent / "channel_ranks.py"


@pytest.mark.slow
def test_ranks_agree_over_shared_memory_and_gloo(tmp_path: Path) -> None:
    kernels = share_kernels(tmp_path / "cache")
    rest = [str(tmp_path / "meeting"), str(kernels)]
    path = os.pathsep.join(filter(None, (str(SCRIPT.parents[3]), os.environ.get("PYTHONPATH"))))
    environ = dict(os.environ) | {"PYTHONPATH": path}
    with (tmp_path / "log").open("wb") as log:
        ranks = [
            warm_process().start(
                str(rank), *rest, environ=environ, output=log, errors=log, script=SCRIPT
            )
            for rank in range(2)
        ]
    try:
        statuses = [rank.wait(120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert statuses == [0, 0], (tmp_path / "log").read_text()[-3000:]
