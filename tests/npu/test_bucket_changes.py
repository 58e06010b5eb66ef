"""Sizes that change while an engine over the SDK's double answers, which strictly counts compiles.

Another process compiles; the engine loads what that has stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import CheckpointCache
from tests.engine.script import run_script
from tests.npu.engines import ONE_CHUNK, OPTIONS, THREE_CHUNKS, WHOLE_CHUNK, Job, Ran, run
from tests.sdk_double.launch import double_environment, read_log

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

SCRIPT = Path(__file__).with_name("bucket_script.py")
PROMPTS = [ONE_CHUNK, THREE_CHUNKS, WHOLE_CHUNK]
START = {"decode": [1, 2, 4], "prefill": [128]}
OTHER = {"decode": [3, 4], "prefill": [128]}
GIB = 1 << 30


def change(
    checkpoint: Path,
    folder: Path,
    changes: list[dict[str, list[int]]],
    options: dict[str, Any] | None = None,
    **double: Any,
) -> tuple[dict[str, Any], Path]:
    """Return the script's result and the double's log."""
    log = folder / f"changes-{len(list(folder.glob('changes-*')))}.jsonl"
    config = {"cache_root": str(folder / "cache"), "record_usage": False}
    request = {
        "path": str(checkpoint),
        "options": OPTIONS | {"additional_config": {"rbln": config}} | (options or {}),
        "prompts": PROMPTS,
        "changes": changes,
        "max_tokens": 8,
    }
    variables = double_environment(log, **double) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return run_script(SCRIPT, request, variables, timeout_s=300), log


def compiles(log: Path, result: dict[str, Any]) -> tuple[int, int]:
    """Return the graphs that the engine's process compiled, and those that others did."""
    fresh = [call for call in read_log(log, "compile") if not call["hit"]]
    own = sum(call["pid"] == result["pid"] for call in fresh)
    return own, len(fresh) - own


def test_another_process_compiles_and_answers_are_those_of_a_fresh_server(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    checkpoint = checkpoints("llama", max_position_embeddings=4096)
    result, log = change(checkpoint, tmp_path, [OTHER, START])
    assert [report["error"] for report in result["reports"]] == [None, None]
    assert [report["graphs"] for report in result["reports"]] == [{"compiled": 1}, {"loaded": 2}]
    assert {name: result["state"][name] for name in START} == START
    assert result["held"] == [3, 4]
    # At the start: one prefill, three decodes, the head. Of the changes: decode of 3.
    assert compiles(log, result) == (5, 1)
    # Graphs that are no longer used were freed on the device: decode of 1, 2, and 3.
    assert len(read_log(log, "freed")) == 3

    job = Job(checkpoint, batches=[[prompt] for prompt in PROMPTS])
    (expected,) = zip(*job.expected(), strict=True)
    assert len(result["answers"]) > len(PROMPTS)
    for number, tokens in result["answers"]:
        assert tokens == expected[number]
    fresh: Ran = run(
        [job],
        tmp_path,
        rbln={
            "decode_batch_bucket_strategy": "manual",
            "decode_batch_bucket_manual_buckets": [3, 4],
        },
    )
    assert fresh.answers == [job.expected()]
    assert all(call["hit"] for call in fresh.calls("compile")), "stored under the usual keys"


@pytest.mark.wide
def test_sizes_change_while_a_step_is_in_flight(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    checkpoint = checkpoints("llama", max_position_embeddings=4096)
    options = {"async_scheduling": True}
    result, log = change(checkpoint, tmp_path, [OTHER, START], options, hold=1)
    assert [report["error"] for report in result["reports"]] == [None, None]
    assert read_log(log, "waited")
    job = Job(checkpoint, batches=[[prompt] for prompt in PROMPTS])
    (expected,) = zip(*job.expected(), strict=True)
    assert len(result["answers"]) > len(PROMPTS)
    for number, tokens in result["answers"]:
        assert tokens == expected[number]


@pytest.mark.wide
def test_a_device_without_room_for_both_sets_keeps_the_old_one(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    checkpoint = checkpoints("llama", max_position_embeddings=4096)
    # Four runtimes of 1 GiB each with KV caches; a fifth has no room.
    result, log = change(checkpoint, tmp_path, [OTHER], memory=GIB * 9 // 2)
    (report,) = result["reports"]
    assert report["phase"] == "failed"
    assert "Not enough device memory for graph decode-3" in report["error"]
    assert {name: result["state"][name] for name in START} == START
    assert result["held"] == [4]
    assert len(read_log(log, "out_of_memory")) == 1
    assert len(result["answers"]) > 0
