"""Serve the default model of an installed wheel from an empty cache: `try_wheel.py VENV [all]`.

Requests one completion and prints it; with `all`, once per level of kernels that this CPU runs, the
better levels set aside. No compiler is on PATH. Exits with 1 if the server fails or does not run
kernels that the wheel brings. Standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

READY_WITHIN_S = 900
_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def _ask(work: Path, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send a request to the server whose run directory is below ``work``; raises OSError."""
    urls = [file.read_text(encoding="ascii").strip() for file in work.glob("rbln-serve-*/url")]
    if not urls:
        raise FileNotFoundError("the server does not listen yet")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(urls[0] + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _wait(work: Path, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server is ready; exits with its log if it fails."""
    until = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < until and server.poll() is None:
        try:
            _ask(work, "/readyz")
        except OSError:
            time.sleep(1)
        else:
            return
    raise SystemExit((work / "log").read_text(encoding="utf-8", errors="replace")[-3000:])


def serve(venv: Path, work: Path) -> dict[str, Any]:
    """Start the server, ask it, stop it and return the device that it describes."""
    model = venv / "share/rbln-serve/default-model"
    command = [venv / "bin/rbln-serve", "serve", model, "--served-model-name", "default-model"]
    environment = os.environ | _OFFLINE | {"VLLM_CACHE_ROOT": str(work / "cache")}
    environment["PATH"] = str(venv / "bin")
    environment.pop("PYTHONPATH", None)
    options = ["--host", "127.0.0.1", "--port", "0", "--run-root", work]
    with (work / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *options], cwd=work, env=environment, stdout=log, stderr=log
        )
    try:
        _wait(work, server)
        body = {"model": "default-model", "prompt": "The", "max_tokens": 8}
        text = _ask(work, "/v1/completions", body)["choices"][0]["text"]
        device: dict[str, Any] = _ask(work, "/v1/server_info")["device"]
    finally:
        server.terminate()
        server.wait(60)
    sys.stdout.write(f"{text!r}, {device['isa']}, {device['library']}, {device['reason']}\n")
    return device


def serve_each_level(venv: Path, work: Path) -> None:
    """Serve by the best level, then without it, until no level of the wheel is left."""
    (levels,) = venv.glob("lib/python3.*/site-packages/rbln_backend/devices/emulated/prebuilt")
    aside = []
    try:
        while True:
            (place := work / str(len(aside))).mkdir()
            library = Path(serve(venv, place)["library"] or "/")
            if library.parent.parent != levels:
                break
            aside.append(library.parent.rename(levels.with_name(library.parent.name)))
    finally:
        for folder in aside:
            folder.rename(levels / folder.name)
    sys.stdout.write(f"{len(aside)} levels of the wheel served\n")


def main(venv: Path, work: Path, *, every: bool) -> None:
    """Serve once or by each level; raises SystemExit."""
    if every:
        serve_each_level(venv, work)
    elif "emulated/prebuilt" not in str(serve(venv, work)["library"]):
        raise SystemExit("try_wheel.py: these are not the wheel's kernels")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(sys.argv[1]).resolve(), Path(folder), every=sys.argv[2:] == ["all"])
