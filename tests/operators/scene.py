"""The scene of the live tests: a server with everything on, its devices, and Prometheus."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rbln_backend.usage import Usage, UsageFile, about_engine
from tests.adapters import make_adapter
from tests.checkpoints import CheckpointCache
from tests.operators.mixed_load import MixedLoad
from tests.operators.prometheus_process import FOLDER, Prometheus
from tests.operators.vendor_exporter import VendorExporter
from tests.server.real_server import RealServer

MAX_IN_FLIGHT = 12
_BURSTS, _REFUSED = 40, 0.15
_RATE_S = 10
# Grafana's variables, all chosen.
_VARIABLES = {"$__rate_interval": f"{_RATE_S}s", "$ttft": "1.0", "$itl": "0.1", "$e2e": "30.0"}
_VARIABLES |= dict.fromkeys(("$job", "$namespace", "$release", "$instance", "$model"), ".*")


@dataclass
class Scene:
    """The running parts; `began` is the Unix time before the server's start."""

    server: RealServer
    prometheus: Prometheus
    devices: VendorExporter
    adapters: Path
    began: float = field(default_factory=time.time)

    def load(self, seconds: float) -> None:
        """Send mixed load, load an adapter and then a burst, and let Prometheus see it."""
        with MixedLoad(self.server) as load:
            for name, path in (("late", "late"), ("bad", "../bad")):
                body = {"lora_name": name, "lora_path": path}
                self.server.client.post("/v1/load_lora_adapter", json=body)
            time.sleep(seconds)
            # How much a machine has served by now depends on its speed, the alert on the share.
            for _ in range(_BURSTS):
                if load.statuses.count(429) > _REFUSED * len(load.statuses):
                    break
                load.burst(6 * MAX_IN_FLIGHT)
            time.sleep(_RATE_S / 2)
        assert {200, 400, 404, 429} <= set(load.statuses) <= {200, 400, 404, 429, 503}

    def series(self, target: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what a panel's query returns over the time of the scene."""
        end = time.time()
        expr = bound(target["expr"], end - self.began)
        if target["instant"]:
            return self.prometheus.now(expr)
        times = {"start": self.began, "end": end, "step": 1}
        data = self.prometheus.ask("query_range", query=expr, **times)
        found: list[dict[str, Any]] = data["result"]
        return found


def bound(expr: str, range_s: float = 60) -> str:
    """Return a dashboard's expression with Grafana's variables filled in."""
    for name, value in {**_VARIABLES, "$__range": f"{int(range_s) + 1}s"}.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


@contextmanager
def running_scene(checkpoints: CheckpointCache, folder: Path) -> Iterator[Scene]:
    """Yield a scene whose server is ready. A model with full and window layers, and LoRA."""
    checkpoint = checkpoints("gemma3_text")
    adapters = folder / "adapters"
    make_adapter(checkpoint, adapters / "fixed", rank=4, seed=1)
    make_adapter(checkpoint, adapters / "late", rank=4, seed=2)
    flags = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    flags += ["--lora-root", str(adapters), "--lora-modules", f"fixed={adapters / 'fixed'}"]
    flags += ["--max-in-flight", str(MAX_IN_FLIGHT)]
    flags += ["--data-dir", str(folder / "data"), "--min-free-bytes", "0"]
    began = time.time()
    with (
        RealServer(checkpoint, folder, *flags) as server,
        VendorExporter(_hostname()) as devices,
        Prometheus(
            folder / "prometheus",
            {
                "rbln-serve": server.url.removeprefix("http://"),
                "rbln-metrics-exporter": devices.target,
            },
        ) as prometheus,
    ):
        server.until_ready()
        prometheus.until('rbln_serve_phase{phase="ready"} == 1')
        # It fires when the rules are evaluated before the first scrape.
        prometheus.until('absent(ALERTS{alertname="RblnNoTargets", alertstate="firing"})')
        _remember_earlier_runs(server)
        yield Scene(server, prometheus, devices, adapters, began)


def _remember_earlier_runs(server: RealServer) -> None:
    """Give the tuner something to work on: the engine itself writes its record once a minute."""
    buckets = server.client.get("/v1/server_info").json()["buckets"]
    sizes = {f"{phase}_buckets": buckets[phase] for phase in ("decode", "prefill")}
    earlier = Usage(about=about_engine("scene", "cpu", **sizes))
    for _ in range(40):
        earlier.phases["prefill"].note(5, buckets["prefill"][-1], 0.004)
        earlier.phases["decode"].note(1, buckets["decode"][0], 0.001)
        earlier.phases["decode"].note(3, buckets["decode"][-1], 0.002)
    UsageFile(Path(buckets["usage_file"])).add(earlier)


def _hostname() -> str:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    name: str = config["scrape_configs"][0]["static_configs"][0]["labels"]["hostname"]
    return name
