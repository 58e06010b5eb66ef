"""Dashboard of NPU devices: the vendor's exporter, joined to the service by pod or host."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Panel, Query, Row, Step
from deploy.grafana.promql import MODEL, OURS, PLACE, VLLM, rate, total

_LEGEND = "{{hostname}} {{pod}} {{name}}"
# Vendor's fact sheet: the clock is lowered at 75 degrees, work is aborted at 85.
_HEAT = (Step(None, "green"), Step(75, "orange"), Step(85, "red"))


def devices_of_service(metric: str, matcher: str = "") -> str:
    """Return the devices of the selected instances; `matcher` selects by another label.

    In Kubernetes the exporter names a device's pod. Elsewhere all devices of an instance's host
    count; the scrape configuration gives the instance a label `hostname`.
    """
    here = f"rbln_serve_build_info{{{OURS}}}"
    extra = f",{matcher}" if matcher else ""
    by_pod = f'{metric}{{pod!=""{extra}}} and on (namespace, pod) {here}'
    by_host = f'{metric}{{pod=""{extra}}} and on (hostname) {here}'
    return f"({by_pod}) or ({by_host})"


def _all(metric: str) -> str:
    return f"sum({devices_of_service(metric)})"


def _in_state(state: str) -> str:
    return devices_of_service("rbln_npu_device_status", f'state="{state}"')


_STATE = (
    Panel(
        "Devices",
        "stat",
        (Query(f"count({_in_state('fault')})"),),
        "Devices of the selected instances.",
        width=4,
        height=6,
    ),
    Panel(
        "Devices in fault",
        "stat",
        (Query(f"sum({_in_state('fault')})"),),
        "Devices whose driver reports the state `fault`.",
        width=4,
        height=6,
        steps=(Step(None, "green"), Step(1, "red")),
    ),
    Panel(
        "State",
        "timeseries",
        (Query(f"{devices_of_service('rbln_npu_device_status')} == 1", _LEGEND + " {{state}}"),),
        "Present state of each device: ready, busy, init, fault, finish or not_found.",
        maximum=1,
    ),
    Panel(
        "Exporters without a driver",
        "stat",
        (Query("count(rbln_up == 0) or vector(0)"),),
        "Exporters whose last query of the driver's daemon failed; their devices have no series.",
        width=4,
        height=6,
        steps=(Step(None, "green"), Step(1, "red")),
    ),
    Panel(
        "Temperature",
        "timeseries",
        (Query(devices_of_service("rbln_npu_temperature"), _LEGEND),),
        "From 75 degrees throttled, from 85 aborted.",
        "celsius",
        steps=_HEAT,
    ),
    Panel(
        "Utilisation",
        "timeseries",
        (Query(devices_of_service("rbln_npu_utilization"), _LEGEND),),
        "As reported by the driver.",
        "percent",
        maximum=100,
    ),
)

_COST = (
    Panel(
        "Power",
        "timeseries",
        (Query(devices_of_service("rbln_npu_power"), _LEGEND),),
        "Watts per card.",
        "watt",
    ),
    Panel(
        "Energy a generated token",
        "timeseries",
        (
            Query(
                f"{_all('rbln_npu_power')} / ({rate('vllm:generation_tokens_total', VLLM)} > 0)",
                "joules",
            ),
        ),
        "Power of all devices divided by tokens per second.",
        "joule",
    ),
    Panel(
        "Memory",
        "timeseries",
        (
            Query(_all("rbln_npu_memory_used"), "used, of the driver"),
            Query(_all("rbln_npu_memory_total"), "total"),
            Query(total("rbln_device_memory_bytes"), "used, of the service"),
        ),
        "Memory by the driver and by the service's allocations: the difference is compiled graphs "
        "and other processes.",
        "bytes",
    ),
    Panel(
        "Temperature by card",
        "table",
        (Query(devices_of_service("rbln_npu_temperature"), _LEGEND, instant=True),),
        "With driver, firmware, pod and host of each card.",
        "celsius",
        width=24,
    ),
)

DEVICES = Dashboard(
    "rbln-devices",
    "rbln-serve / NPU devices",
    "Metrics of rbln-metrics-exporter with PROMETHEUS_METRIC_NAMES=true, for the devices of the "
    "selected instances.",
    (Row("State", _STATE), Row("Cost", _COST)),
    (*PLACE, MODEL),
)
