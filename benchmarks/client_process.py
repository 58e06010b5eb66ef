"""A client of a server as a process of its own: it reads one JSON object and answers one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


class ClientProcess:
    """``python -m MODULE`` with ``asked`` on its standard input, started when it is made."""

    def __init__(self, module: str, asked: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """Close its input and return what it tells when it is done."""
        told: dict[str, Any] = json.loads(self._process.communicate()[0])
        return told
