"""Text and tables of docs/observability.md: traces, alerts, dashboards with their panels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from deploy.grafana.generate import DASHBOARDS
from deploy.grafana.panel import Dashboard
from server.observability.genai import OPERATIONS

_ALERTS = Path(__file__).resolve().parents[1] / "deploy" / "prometheus" / "alerts.yml"
_LABEL = re.compile(r"\{\{ \$labels\.(\w+) \}\}")
ALERT_HEADER = ("Alert", "Severity", "After", "Summary")
PANEL_HEADER = ("Panel", "Shows")
SPAN_HEADER = ("Attribute", "Value")

TRACES = (
    "`--otlp-traces-endpoint URL` sends OpenTelemetry spans, for example to a Jaeger on the same "
    "host:",
    """\
```sh no-run: needs Prometheus and Docker
docker run -d -p 4317:4317 -p 16686:16686 jaegertracing/jaeger:2.1.0    # its page: port 16686
rbln-serve serve MODEL --otlp-traces-endpoint http://localhost:4317
```""",
    "**Request spans** (`SERVER`). Each request to a route that needs the engine has one, as a "
    "child of its header `traceparent`. Its name is `{operation} {model}`, such as "
    "`chat default-model`; `{operation}` if the request is refused before its model is known; "
    "method and route if the route does not run the model (`POST /tokenize`). It ends after the "
    "last byte of the answer, or when the client disconnects, a deadline passes, or the request is "
    "refused. Batch lines and background responses have spans of kind `INTERNAL` in separate "
    "traces, without `http.*` and `url.*`. There are none for requests before the service is "
    "ready, probes, `/metrics`, the console and routes of stored files, batches and responses.",
    "**Engine spans** (`llm_request`, `INTERNAL`). One for each sequence of the request in the "
    "engine, as its child: two for `n: 2`. Aborted sequences have one, the self-test at the start "
    "has none. `gen_ai.latency.*` are seconds, by vLLM's names; stages that were not reached are "
    "absent.",
    "**Names** are those of OpenTelemetry's semantic conventions for HTTP and generative AI "
    "(schema URL `https://opentelemetry.io/schemas/1.41.1`; scope `rbln_serve` with the server's "
    "version). No attribute holds text of prompts, answers, tools or stop sequences. Client texts "
    "are truncated after 256 characters.",
    "**Status.** `Error` for server errors: a status of 500 or more, deadlines, and streams that "
    "fail after their head. The status of refused (4xx) and aborted requests is unset, and "
    "`error.type` has the reason.",
    "`OTEL_SERVICE_NAME` (default `rbln-serve`) and the other variables of OpenTelemetry's SDK "
    "apply, including the sampler's; `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` selects `grpc` or "
    "`http/protobuf`. Without the flag nothing of OpenTelemetry is imported.",
)
_SPAN_ROWS = (
    ("gen_ai.operation.name", "{operations}"),
    ("gen_ai.provider.name", "`rbln_serve`"),
    ("gen_ai.request.model", "The requested model, also an unknown one."),
    (
        "gen_ai.request.*",
        "`max_tokens`, `temperature`, `top_p`, `top_k`, `seed`, `frequency_penalty`, "
        "`presence_penalty`, `choice.count` (above 1), `stream` and `encoding_formats`, if the "
        "request has them; also `gen_ai.embeddings.dimension.count`.",
    ),
    ("gen_ai.response.model", "The served model or adapter that answers."),
    ("gen_ai.response.id", "The id of the answer."),
    (
        "gen_ai.response.finish_reasons",
        "The API's values, one per choice. Of engine spans: `stop`, `length`, `abort` or `error`.",
    ),
    (
        "gen_ai.usage.*",
        "`input_tokens`, `output_tokens` and `cache_read.input_tokens` (prompt tokens found in the "
        "prefix cache): processed tokens, also of an aborted answer. Absent if the engine got no "
        "request.",
    ),
    ("error.type", "The error's `code`; `aborted` if the client disconnected."),
    (
        "http.*, url.*, network.protocol.version",
        "`http.request.method`, `http.route`, `http.response.status_code` (499: the client "
        "disconnected before the answer's head), `http.request.header.x-request-id`, `url.path` "
        "(never the query) and `url.scheme`.",
    ),
    ("server.address, server.port", "From the request's header `Host`."),
    ("user_agent.original", "The request's header `User-Agent`."),
    ("rbln_serve.outcome", "The outcome, as in the metrics."),
    ("rbln_serve.key", "The name of the API key."),
)

SET_UP = """\
```sh no-run: needs Docker
prometheus --config.file=deploy/prometheus/prometheus.yml      # edit the targets first
docker run -p 3000:3000 \\
  -v ./deploy/grafana/provisioning:/etc/grafana/provisioning:ro \\
  -v ./deploy/grafana/dashboards:/var/lib/grafana/dashboards/rbln-serve:ro grafana/grafana:10.4.0
```"""

PARAGRAPHS = (
    "`deploy/prometheus` holds a scrape configuration, recording rules and alerts, "
    "`deploy/grafana` dashboards as code, their JSON and its provisioning (Grafana 10.4 or later). "
    "The metrics are described in [metrics](metrics.md).",
    "The job must be called `rbln-serve`. A service with keys needs one for `/metrics`, too "
    "(`credentials_file`), unless it runs with `--open-metrics`. Dashboards read metrics only; "
    "alerts also need `rules.yml`. Dashboards have variables for the data source, job, namespace, "
    "release, instance and, with vLLM's metrics, the model. The overview has one per objective, "
    "with the bounds of vLLM's histograms.",
    "**Several releases.** Give the targets of each model or Helm release a label `release`, as "
    "`deploy/prometheus/prometheus.yml` does. Recording rules and alerts keep the labels "
    "`namespace` and `release`, so that error budgets are per release and Alertmanager can route "
    "by them. `RblnNoTargets` of these files fires when no release has a target. The Helm chart "
    "sets both labels and renders rules that select its release only, `RblnNoTargets` included, "
    "and dashboards with addresses of their own "
    "([kubernetes.md](kubernetes.md#monitoring)).",
    "**Devices.** The vendor's `rbln-metrics-exporter` (with `PROMETHEUS_METRIC_NAMES=true`) "
    "reports devices without models. The dashboard joins it with the service on `namespace` and "
    "`pod`, else on `hostname`, which the scrape configuration adds to the service. Without a pod "
    "all devices of the host are shown. Its job needs `honor_labels: true`. No NPU was available: "
    "tests and pictures use a stand-in with the documented metrics and labels.",
    "**Tested.** `tests/operators` starts a real Prometheus over a real server under mixed load "
    "and evaluates every expression of dashboards, rules, alerts and runbooks: each parses, uses "
    "only existing metrics and labels, and every panel returns data, except those with a reason in "
    "a table of the test. Every alert fires and stays silent in a scenario of "
    "`tests/operators/alerts.test.yml`; some fire live. The dashboards were not viewed in a "
    "running Grafana.",
    "**Pictures.** The pictures below are no screenshots: matplotlib drew them (see "
    "`docs/pictures.py`) from what the panels' own queries returned of a tiny model on the "
    "emulated device on a busy machine with two cores; they show what there is to see, not what is "
    "fast. Time is in seconds "
    "since the server's start.",
)


def span_rows() -> list[tuple[str, ...]]:
    """Return a row for each attribute of spans."""
    operations = ", ".join(f"`{name}`" for name in dict.fromkeys(OPERATIONS.values()))
    return [
        (", ".join(f"`{name}`" for name in names.split(", ")), about.format(operations=operations))
        for names, about in _SPAN_ROWS
    ]


def alert_rows() -> list[tuple[str, ...]]:
    """Return a row for each alert of alerts.yml, with a link to its runbook."""
    groups = yaml.safe_load(_ALERTS.read_text(encoding="utf-8"))["groups"]
    return [_alert_row(rule) for group in groups for rule in group["rules"]]


def dashboard_parts() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return heading, picture and rows of panels of each dashboard."""
    return [
        (
            f"### {_short(dashboard)}",
            f"{dashboard.description}\n\n"
            f"![{_short(dashboard)}, drawn by matplotlib](images/{dashboard.uid}.png)",
            [(panel.title, panel.description) for panel in dashboard.panels],
        )
        for dashboard in DASHBOARDS
    ]


def _short(dashboard: Dashboard) -> str:
    return dashboard.title.removeprefix("rbln-serve / ")


def _alert_row(rule: dict[str, Any]) -> tuple[str, ...]:
    name = rule["alert"]
    severity = ", ".join(rule["labels"].values())
    says = _LABEL.sub(r"*\1*", rule["annotations"]["summary"])
    return (f"[{name}](runbooks/{name}.md)", severity, str(rule.get("for", "at once")), says)
