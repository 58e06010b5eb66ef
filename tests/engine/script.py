"""A script in a process of its own, and the JSON value that it prints after ``RESULT``."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.warm_process import warm_process


def run_script(
    script: Path,
    argument: object,
    environment: Mapping[str, str],
    *,
    timeout_s: float = 180,
    own_imports: bool = False,
) -> Any:
    """Run ``script`` with ``argument`` as its JSON ``sys.argv[1]``; it must end with 0.

    ``own_imports``: in a new Python instead of a fork of one that has imported vLLM.
    """
    words = json.dumps(argument)
    if own_imports:
        result = subprocess.run(
            [sys.executable, str(script), words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    else:
        result = warm_process().run(words, environ=environment, script=script, timeout=timeout_s)
    assert result.returncode == 0, result.stderr[-3000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))
