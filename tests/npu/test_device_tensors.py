"""Weights, caches and buffers as tensors of torch's device ``rbln``: the vendor's default form.

torch-rbln is the vendor's wheel, over a small library of ours that stands for the driver; the SDK
is the double.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.npu.engines import Job, run
from tests.sdk_double.launch import FOLDER
from tests.vendor.environment import native_library, vendor_python

pytestmark = [pytest.mark.engine, pytest.mark.wide, pytest.mark.timeout(1800)]

LONG = {"max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def torch_rbln(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables that let our environment import the vendor's torch-rbln, and nothing else of it."""
    folder = tmp_path_factory.mktemp("torch-rbln")
    (packages,) = (vendor_python().parents[1] / "lib").glob("python*/site-packages")
    for found in packages.glob("torch_rbln*"):
        (folder / found.name).symlink_to(found)
    root = str(Path(__file__).parents[2])
    return {
        "PYTHONPATH": ":".join((str(FOLDER), str(folder), root)),
        "LD_LIBRARY_PATH": str(native_library()),
        "TORCH_RBLN_SKIP_ABI_CHECK": "1",
    }


def test_answers_are_transformers(
    checkpoints: CheckpointCache, torch_rbln: dict[str, str], tmp_path: Path
) -> None:
    jobs = [
        Job(checkpoints("llama", **LONG)),
        Job(checkpoints("exaone4", **LONG, sliding_window=200)),
        Job(checkpoints("qwen3_moe", **LONG)),
    ]
    ran = run(jobs, tmp_path, environment=torch_rbln)
    assert [job.expected() for job in jobs] == ran.answers
    compiles = ran.calls("compile")
    assert compiles
    for call in compiles:
        assert {given["device"] for given in call["inputs"]} == {"rbln"}
        assert call["options"]["model_trace_method"] == "export"
        assert "compile_context" not in call["options"]
    assert not ran.calls("copy_kv"), "torch copies the heads of blocks"
    warm = run(jobs[:1], tmp_path, environment=torch_rbln)
    assert warm.answers == ran.answers[:1]
    assert all(call["hit"] for call in warm.calls("compile"))


def test_what_is_asked_for_and_missing_is_refused(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    job = Job(checkpoints("llama", **LONG))
    with pytest.raises(AssertionError, match=r"use_device_tensor .* needs torch-rbln"):
        run([job], tmp_path, rbln={"use_device_tensor": True})
