"""A script in a Python process of its own, and the JSON value it prints behind ``RESULT``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_script(
    script: Path, argument: object, environment: Mapping[str, str], *, timeout_s: float = 180
) -> Any:
    """Run ``script`` with ``argument`` as its JSON ``sys.argv[1]``; it must end with 0."""
    result = subprocess.run(
        [sys.executable, str(script), json.dumps(argument)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))
