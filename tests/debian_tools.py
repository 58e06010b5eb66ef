"""Programs of Debian packages that some tests run; `make test-tools` installs them."""

import os
import shutil
from collections import Counter

import pytest

_SKIPPED = "is not installed: make test-tools"


def debian_tool(name: str) -> str:
    """Return the path of the program ``name``; skips the calling test if it is missing."""
    # Debian installs nginx where only root's PATH looks.
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    if path is None:
        pytest.skip(f"{name} {_SKIPPED}")
    return path


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the tests that were skipped for missing programs."""
    tools: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
        if reason.endswith(_SKIPPED):
            tools[reason.removeprefix("Skipped: ").split()[0]] += 1
    if tools:
        names = ", ".join(sorted(tools))
        terminalreporter.write_line(
            f"{tools.total()} tests skipped for missing programs ({names}): make test-tools"
        )
