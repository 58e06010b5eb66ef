"""Measured step times, and both sets of buckets run in turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.commands.cli import main
from tests.checkpoints import CheckpointCache

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.wide, pytest.mark.timeout(900)]


def test_a_trace_is_measured_and_verified(
    checkpoints: CheckpointCache, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": burst, "prompt_tokens": 20, "output_tokens": 8}
        for burst in range(3)
        for _ in range(5)
    ]
    lines.append({"arrival_s": 9, "prompt_tokens": 2000, "output_tokens": 8})
    trace.write_text("\n".join(map(json.dumps, lines)))
    # The larger chunk is as long as the context.
    sizes = ["--decode-buckets", "1,8", "--prefill-buckets", "32,128", "--decode-graphs", "2"]
    measured = ["--measure", str(checkpoints("llama")), "--max-model-len", "128"]
    assert main(["tune", "--trace", str(trace), *sizes, "--format", "json", *measured]) == 0
    shown = capfd.readouterr()
    (report,) = json.loads(shown.out)
    assert report["step_times"] == "measured"
    assert report["left_out"] == 1
    assert len(report["decode"]["suggested"]) <= 2
    verified = report["verified"]
    assert verified["seconds_then"] > 0
    assert verified["seconds_now"] > 0
    assert "measuring [" in shown.err


def test_a_model_that_cannot_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 2, "output_tokens": 2}\n')
    assert main(["tune", "--trace", str(trace), "--measure", str(tmp_path)]) == 1
    assert "the measuring ended with status 1" in capsys.readouterr().err
