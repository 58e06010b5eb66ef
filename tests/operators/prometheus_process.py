"""A real Prometheus with the configuration of deploy/prometheus, scraping every second.

Needs Debian's prometheus: `make test-tools`.
"""

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from tests.debian_tools import debian_tool
from tests.ports import free_port

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
# The last one is off by default.
RULE_FILES = ("rules.yml", "alerts.yml", "alerts.extended.yml")
_START_S = 60.0


class Prometheus:
    """One process; a context manager. `targets` replaces the targets of the scrape jobs.

    What waits in deploy/prometheus (`for`, 15 s between scrapes) does not wait here. `bounds` gives
    alerts other bounds, by their names: what stands in the expression, and what instead.
    """

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, str],
        bounds: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        _write_configuration(folder, targets, bounds or {})
        address = f"127.0.0.1:{free_port()}"
        command = [debian_tool("prometheus"), f"--config.file={folder / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.url = f"http://{address}"
        self._client = httpx.Client(base_url=self.url, timeout=30)

    def __enter__(self) -> Self:
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            assert self._process.poll() is None, self._log.read_text()
            try:
                if self._client.get("/-/ready").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(self._log.read_text())

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)

    def ask(self, path: str, **params: str | float) -> Any:
        """Return `data` of an answer of the HTTP API; a refused expression is an AssertionError."""
        answer = self._client.post(f"/api/v1/{path}", data=params)
        if answer.status_code == 405:
            answer = self._client.get(f"/api/v1/{path}", params=params)
        body = answer.json()
        assert body["status"] == "success", f"{params}: {body.get('error')}"
        return body["data"]

    def now(self, expr: str) -> list[dict[str, Any]]:
        """Return the instant vector of `expr`."""
        found: list[dict[str, Any]] = self.ask("query", query=expr)["result"]
        return found

    def firing(self) -> set[str]:
        alerts = self.ask("alerts")["alerts"]
        return {a["labels"]["alertname"] for a in alerts if a["state"] == "firing"}

    def until(self, expr: str, patience_s: float = 180.0) -> None:
        end = time.monotonic() + patience_s
        while not self.now(expr):
            assert time.monotonic() < end, f"still nothing: {expr}"
            time.sleep(0.2)


def read_rules(name: str) -> list[dict[str, Any]]:
    """Return the rules of a file of deploy/prometheus, of all its groups."""
    groups = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _write_configuration(
    folder: Path, targets: Mapping[str, str], bounds: Mapping[str, tuple[str, str]]
) -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        found = [target] if (target := targets.get(job["job_name"])) else []
        job["static_configs"][0]["targets"] = found
    config["rule_files"] = list(RULE_FILES)
    for name in RULE_FILES:
        groups = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
        for group in groups["groups"]:
            for rule in group["rules"]:
                rule.pop("for", None)
                if (bound := bounds.get(rule.get("alert", ""))) is not None:
                    assert bound[0] in rule["expr"], rule
                    rule["expr"] = rule["expr"].replace(*bound)
        (folder / name).write_text(yaml.safe_dump(groups), encoding="utf-8")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
