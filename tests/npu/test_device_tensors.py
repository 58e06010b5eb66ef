"""Weights, caches and buffers as tensors of torch's device ``rbln``: the vendor's default form.

torch-rbln is the vendor's wheel, over a small library of ours that stands for the driver; the SDK
is the double.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.npu.engines import Job, run
from tests.vendor.environment import torch_rbln_variables

pytestmark = [pytest.mark.engine, pytest.mark.wide, pytest.mark.timeout(1800)]

LONG = {"max_position_embeddings": 4096}


def test_answers_are_transformers(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    environment = torch_rbln_variables()
    jobs = [
        Job(checkpoints("llama", **LONG)),
        Job(checkpoints("exaone4", **LONG, sliding_window=200)),
        Job(checkpoints("qwen3_moe", **LONG)),
    ]
    ran = run(jobs, tmp_path, environment=environment)
    assert [job.expected() for job in jobs] == ran.answers
    compiles = ran.calls("compile")
    assert compiles
    for call in compiles:
        assert {given["device"] for given in call["inputs"]} == {"rbln"}
        assert call["options"]["model_trace_method"] == "export"
        assert "compile_context" not in call["options"]
    assert not ran.calls("copy_kv"), "torch copies the heads of blocks"
    warm = run(jobs[:1], tmp_path, environment=environment)
    assert warm.answers == ran.answers[:1]
    assert all(call["hit"] for call in warm.calls("compile"))


def test_a_required_but_missing_package_is_refused(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    job = Job(checkpoints("llama", **LONG))
    with pytest.raises(AssertionError, match=r"use_device_tensor .* needs torch-rbln"):
        run([job], tmp_path, rbln={"use_device_tensor": True})
