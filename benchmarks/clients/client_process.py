"""Client process of a server: reads one JSON object and writes one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


class ClientProcess:
    """``python -m MODULE`` with ``request`` on its standard input, started at construction."""

    def __init__(self, module: str, request: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def end(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Close its input and return its result.

        Raises ``subprocess.SubprocessError`` if it fails or exceeds the time, which ends it.
        """
        try:
            answer = self._process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        if self._process.returncode:
            raise subprocess.CalledProcessError(self._process.returncode, self._process.args)
        result: dict[str, Any] = json.loads(answer)
        return result
