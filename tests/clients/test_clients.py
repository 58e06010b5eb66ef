"""The clients that people use, in an environment of their own, against the default model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from default_model.paths import CHECKPOINT
from tests.clients.environment import clients_python
from tests.server.real_server import RealServer

pytestmark = [pytest.mark.wide, pytest.mark.timeout(1200)]

EIGHTY_FOUR = "12 * 7 = 84"
PARIS = {"city": "Paris"}
ANSWERS: dict[str, dict[str, Any]] = {
    "langchain": {
        "invoke": EIGHTY_FOUR,
        "stream": EIGHTY_FOUR,
        "tool": PARIS,
        "structured": PARIS,
    },
    "llama_index": {"chat": EIGHTY_FOUR, "stream": EIGHTY_FOUR, "forced tool": PARIS},
    "instructor": {"tools": PARIS, "schema": PARIS},
    "litellm": {"openai": EIGHTY_FOUR, "openai, streamed": EIGHTY_FOUR, "anthropic": EIGHTY_FOUR},
}


def test_every_call_of_every_client_is_answered(tmp_path: Path) -> None:
    python = clients_python()
    own = ("--served-model-name", "default-model", "--max-model-len", "1024")
    with RealServer(CHECKPOINT, tmp_path, *own) as server:
        server.until_ready()
        done = subprocess.run(
            [python, str(Path(__file__).with_name("calls.py")), server.url],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ANSWERS
