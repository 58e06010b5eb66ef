"""What each case came to: a table on the terminal, and a file for `compare`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_OWN = "test_own_"
"""Files that are about this server alone."""


@dataclass(frozen=True)
class Result:
    """One case: `result` is passed, failed or skipped; `detail` says why it is not the first."""

    area: str
    case: str
    result: str
    detail: str


class Report:
    """A pytest plugin. Nothing is left out: a case that could not run says so in its row."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._titles: dict[str, tuple[str, str]] = {}
        self._results: dict[str, Result] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.path.parent == _HERE and not item.path.name.startswith(_OWN):
                self._titles[item.nodeid] = _title(item)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self._titles:
            return
        if report.when != "call" and report.passed:
            return
        area, case = self._titles[report.nodeid]
        earlier = self._results.get(report.nodeid)
        if earlier is not None and earlier.result == "failed":
            return
        self._results[report.nodeid] = Result(area, case, report.outcome, _detail(report))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        path = self._config.getoption("--conformance-report")
        if path is not None:
            rows = [asdict(result) for result in self._results.values()]
            Path(path).write_text(json.dumps(rows, indent=1), encoding="utf-8")
        if not self._results or self._config.getoption("--base-url") is None:
            return
        terminalreporter.section("conformance")
        width = max(len(result.case) for result in self._results.values())
        for result in sorted(self._results.values(), key=lambda result: result.area):
            line = f"{result.area:<12} {result.case:<{width}} {result.result:<8} {result.detail}"
            terminalreporter.write_line(line.rstrip()[:200])


def _title(item: pytest.Item) -> tuple[str, str]:
    words = item.name.partition("[")
    case = words[0].removeprefix("test_").replace("_", " ")
    return item.path.stem.removeprefix("test_"), f"{case} {words[2].rstrip(']')}".rstrip()


def _detail(report: pytest.TestReport) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return " ".join(str(text).split())[:160]
