"""`rbln-serve collect-env`: what a bug report needs, without secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import server

HEAVY = "{'torch', 'vllm', 'transformers'}"


def test_the_report_has_versions_and_hides_secrets() -> None:
    variables = {
        "RBLN_SERVE_API_KEY": "name=sk-1",
        "HF_TOKEN": "hf-2",
        "HF_ENDPOINT": "https://user:pass-3@mirror.example",
        "VLLM_CACHE_ROOT": "/nowhere/cache",
        "HOME_SECRET": "unlisted-4",
    }
    code = (
        "import sys\nfrom server.commands.cli import main\nmain(['collect-env', '--json'])\n"
        f"print(sorted({HEAVY} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    assert done.stderr.strip() == "[]"
    found = json.loads(done.stdout)
    assert found["rbln-serve"]["version"] == server.__version__
    assert found["packages"]["vllm"]
    assert found["hardware"]["kernels"].endswith("portable")
    assert found["cache"]["root"] == "/nowhere/cache"
    shown = found["variables"]
    assert shown["RBLN_SERVE_API_KEY"] == shown["HF_TOKEN"] == "***"
    assert shown["HF_ENDPOINT"] == "https://***@mirror.example"
    assert not {"sk-1", "hf-2", "pass-3", "unlisted-4"} & set(done.stdout.replace('"', " ").split())
    assert "pass-3" not in done.stdout


def test_the_text_has_the_same_sections() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "server", "collect-env"], capture_output=True, text=True, check=True
    )
    titles = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert titles == ["rbln-serve:", "hardware:", "packages:", "cache:", "variables:"]
