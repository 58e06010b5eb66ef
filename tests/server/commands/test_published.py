"""The table of published models says what `check` says today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.timeout(1200)
def test_verdicts_are_those_of_today() -> None:
    done = subprocess.run(
        [sys.executable, "docs/published.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"run `make published`\n{done.stdout}{done.stderr}"
