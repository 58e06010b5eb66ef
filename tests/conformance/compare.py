"""Run the suite against this server and vLLM's own; write docs/conformance.md.

`python -m tests.conformance.compare` serves the same tiny model with both, one after the other:
this server with its defaults, and `vllm serve` on vLLM's CPU platform from the same environment.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path

import httpx

from tests.checkpoints import CheckpointCache
from tests.conformance.own_server import API_KEY, FLAGS, own_server
from tests.server.real_server import FLAGS as SIZES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"
PORT = 8599
READY_TIMEOUT_S = 600.0
# The default memory would be half of the machine.
VLLM_ENVIRONMENT = {"VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1"}
SIDES = ("rbln-serve", "vLLM")

Cases = dict[tuple[str, str], tuple[str, str]]


def main() -> int:
    """Compare and write the page."""
    checkpoints = CheckpointCache(Path.home() / ".cache" / "rbln-serve" / "test-checkpoints")
    results: list[Cases] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with own_server(checkpoints, folder) as target:
            results.append(_run(target.base_url, folder / "ours.json"))
        with _vllm(checkpoints("llama", dtype="float32"), folder / "vllm.log") as url:
            results.append(_run(url, folder / "vllm.json"))
    PAGE.write_text(page(results[0], results[1]), encoding="utf-8")
    sys.stdout.write(f"{PAGE} is written\n")
    return 0


def page(ours: Cases, theirs: Cases) -> str:
    """Return the page: what ran, how many passed, and each case with both results."""
    rows = [f"| | {SIDES[0]} | {SIDES[1]} |", "| --- | --- | --- |"]
    for result in ("passed", "failed", "skipped"):
        counts = [sum(found[0] == result for found in side.values()) for side in (ours, theirs)]
        rows.append(f"| {result} | {counts[0]} | {counts[1]} |")
    lines = [
        "# Conformance",
        "",
        "Compare this server with `vllm serve`, case by case.",
        "",
        "<!-- Written by `python -m tests.conformance.compare`; a record of measured runs. -->",
        "",
        f"`tests/conformance` on {date.today().isoformat()}, {platform.machine()}, "
        f"{os.cpu_count()} processors: rbln-serve {version('rbln-serve')} on the emulated device, "
        f"and `vllm serve` {version('vllm')} on vLLM's own CPU platform. Both served the same tiny "
        "Llama with random weights, with the same flags (except vLLM's block size, which must be a "
        "multiple of 32) and one API key. Clients: openai "
        f"{version('openai')}, anthropic {version('anthropic')}, httpx {version('httpx')}.",
        "",
        "The cases are this project's, and many cover gaps of vLLM 0.30. Where OpenAI's documents "
        "leave the result open, the expectation is this project's, too; a failed row has it. Read "
        "rows rather than counts. The suite runs against any server: "
        "`pytest tests/conformance --base-url URL [--api-key K] [--model M]`.",
        "",
        *rows,
        "",
    ]
    for area in dict.fromkeys(area for area, _ in (*ours, *theirs)):
        lines += [f"## {area}", "", f"| Case | {SIDES[0]} | {SIDES[1]} |", "| --- | --- | --- |"]
        cases = dict.fromkeys(case for other, case in (*ours, *theirs) if other == area)
        for case in cases:
            cells = [_cell(side.get((area, case))) for side in (ours, theirs)]
            lines.append(f"| {_plain(case)} | {cells[0]} | {cells[1]} |")
        lines.append("")
    return "\n".join(lines)


def _cell(result: tuple[str, str] | None) -> str:
    if result is None:
        return "did not run"
    outcome, detail = result
    return outcome if outcome == "passed" else _plain(f"**{outcome}**: {detail}")


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _run(base_url: str, report: Path) -> Cases:
    command = [sys.executable, "-m", "pytest", "tests/conformance", "-q", "--no-header", "--tb=no"]
    command += [
        "--ignore-glob",
        "*/test_own_*",
        "--base-url",
        base_url,
        "--api-key",
        API_KEY,
        "--conformance-report",
        str(report),
    ]
    subprocess.run(command, cwd=ROOT, check=False, timeout=1800)
    return {
        (row["area"], row["case"]): (row["result"], row["detail"])
        for row in json.loads(report.read_text(encoding="utf-8"))
    }


@contextmanager
def _vllm(checkpoint: Path, log: Path) -> Iterator[str]:
    """Serve with vLLM's own server until the end of the block."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint), *SIZES]
    # Its attention supports multiples of 32 only.
    command += [
        *FLAGS,
        "--block-size",
        "32",
        "--api-key",
        API_KEY,
        "--host",
        "127.0.0.1",
        "--port",
        str(PORT),
    ]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "RBLN_"))}
    environment = {**kept, **VLLM_ENVIRONMENT, "VLLM_NO_USAGE_STATS": "1"}
    url = f"http://127.0.0.1:{PORT}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        _until_healthy(process, url, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise TimeoutError(log.read_text(errors="replace")[-4000:])


if __name__ == "__main__":
    sys.exit(main())
