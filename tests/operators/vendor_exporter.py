"""A stand-in of the vendor's rbln-metrics-exporter, with its documented metrics and labels."""

import itertools
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

# Metric -> value. With PROMETHEUS_METRIC_NAMES=true; all are gauges.
VENDOR_METRICS = {
    "rbln_npu_temperature": 48.0,
    "rbln_npu_power": 43.9,
    "rbln_npu_memory_used": 8.0e9,
    "rbln_npu_memory_total": 16877882368.0,
    "rbln_npu_utilization": 61.0,
    "rbln_npu_power_state": 2.0,
}
STATES = ("ready", "busy", "init", "fault", "finish", "not_found")
# `namespace`, `pod` and `container` are there in Kubernetes alone.
VENDOR_LABELS = (
    *"name uuid card deviceID hostname driver_version firmware_version".split(),
    *"smc_version namespace pod container".split(),
)


class VendorExporter:
    """Two devices of one host on a port of its own; a context manager.

    `values`, `state` (of both devices) and `is_up` (the daemon answers) may be changed.
    """

    def __init__(self, hostname: str) -> None:
        self.values = dict(VENDOR_METRICS)
        self.state, self.is_up = "busy", True
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = exporter._page(hostname).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                # A Prometheus that ends leaves in the middle of a scrape.
                with suppress(BrokenPipeError, ConnectionResetError):
                    self.wfile.write(page)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.target = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _page(self, hostname: str) -> str:
        lines = ["# TYPE rbln_up gauge", f"rbln_up {int(self.is_up)}"]
        for metric, value in self.values.items() if self.is_up else ():
            lines += [f"# HELP {metric} One device.", f"# TYPE {metric} gauge"]
            for number in range(2):
                labels = _labels(hostname, number)
                lines.append(f"{metric}{{{labels}}} {value + number * (value > 1)}")
        if self.is_up:
            lines.append("# TYPE rbln_npu_device_status gauge")
            for number, state in itertools.product(range(2), STATES):
                labels = f'{_labels(hostname, number)},state="{state}"'
                lines.append(f"rbln_npu_device_status{{{labels}}} {int(state == self.state)}")
        return "\n".join(lines) + "\n"


def _labels(hostname: str, number: int) -> str:
    return (
        f'name="rbln{number}",uuid="uuid-{number}",card="RBLN-CA25",deviceID="{number}",'
        f'hostname="{hostname}",driver_version="2.0.0",firmware_version="1.0.0"'
    )
