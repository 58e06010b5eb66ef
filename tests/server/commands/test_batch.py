"""`rbln-serve batch`: a file of requests, answered without a service, gone on with after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import CheckpointCache
from tests.graph_cache import graph_cache
from tests.server.real_server import FLAGS
from tests.warm_process import ForkedProcess, warm_process

pytestmark = pytest.mark.engine

LINES = 300


def line(number: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": [3 + number % 40, 7], "max_tokens": 24, "temperature": 0}
    body |= {"ignore_eos": True}
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body} | (
        fields
    )


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def started(checkpoint: Path, tmp_path: Path) -> ForkedProcess:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "RBLN_"))}
    command = ["batch", str(tmp_path / "in.jsonl")]
    command += ["-o", str(tmp_path / "out.jsonl"), "--model", str(checkpoint), *FLAGS]
    command += ["--min-free-bytes", "0", "--run-root", str(tmp_path)]
    environ = {**kept, "VLLM_CACHE_ROOT": str(graph_cache()), "VLLM_NO_USAGE_STATS": "1"}
    with (tmp_path / "log").open("wb") as log:
        return warm_process().start(*command, environ=environ, output=log, errors=log)


def kill_with_engine(process: ForkedProcess) -> None:
    process.kill()
    process.wait(60)


def test_it_goes_on_where_it_was_killed(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    lines = [line(number) for number in range(LINES)]
    lines[5]["body"]["max_tokens"] = -1
    write(tmp_path / "in.jsonl", lines)
    first = started(checkpoints("llama"), tmp_path)
    parts = tmp_path / "out.jsonl.partial" / "parts"
    deadline = time.monotonic() + 240
    while not any(part.stat().st_size > 2000 for part in parts.glob("*.output")):
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    kill_with_engine(first)
    assert not (tmp_path / "out.jsonl").exists()
    second = started(checkpoints("llama"), tmp_path)
    status = second.wait(240)
    errors = (tmp_path / "log").read_text()
    assert status == 0, errors
    assert f"lines {LINES}/{LINES}, 1 failed" in errors
    found = list(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()))
    assert [one["custom_id"] for one in found] == [f"c{number}" for number in range(LINES)]
    assert found[5]["response"]["body"]["error"]["param"] == "max_tokens"
    texts = [one["response"]["body"]["choices"][0]["text"] for n, one in enumerate(found) if n != 5]
    # Forty prompts in turn: equal prompts have equal answers.
    assert texts[0] == texts[39]
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_wrong_lines_are_reported(tmp_path: Path) -> None:
    wrong = [line(1), line(2, method="GET"), line(3, url="/v1/embeddings"), line(1)]
    write(tmp_path / "in.jsonl", wrong)
    # A folder without a model: lines are checked before the engine reads it.
    process = started(tmp_path, tmp_path)
    assert process.wait(60) == 1
    errors = (tmp_path / "log").read_text()
    assert "line 2: 'method' must be 'POST'" in errors
    assert "got '/v1/embeddings'" in errors and "line 3: 'url' must be" in errors
    assert "line 4: 'custom_id' 'c1' is that of an earlier line" in errors
    assert "model" not in errors


def test_lines_of_unknown_endpoints_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [line(1, url="/v1/none")])
    process = started(tmp_path, tmp_path)
    assert process.wait(60) == 1
    errors = (tmp_path / "log").read_text()
    assert "url of the first line: must be one of /v1/chat/completions" in errors
    assert "got '/v1/none'" in errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("in.jsonl", "--model", "m"), "-o OUT and --model MODEL are needed"),
        (("none.jsonl", "-o", "out", "--model", "m"), "none.jsonl is no file"),
    ],
)
def test_wrong_command_lines(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    command = [sys.executable, "-m", "server", "batch", *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 2
    assert said in ended.stderr
