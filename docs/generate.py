"""Write docs/configuration.md, metrics.md, models.md, observability.md, results.md,
server_info.md and vllm_serve.md.

Also the table of routes in docs/security.md, those of routes, errors and fields in
docs/http_api.md, and that of speed in README. The results in models.md are those of docs/models.py
and docs/published.py.

`python docs/generate.py` rewrites the pages; with `--check` it changes nothing and exits with 1
when a page is not what the code says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import upstream_page
from errors_page import ERROR_HEADER, ERRORS_BEGIN, between, error_rows
from fields_page import FIELD_HEADER, field_tables
from models_page import HEADER, conditions, family_rows, load_results, refusal_rows
from observability_page import (
    ALERT_HEADER,
    PANEL_HEADER,
    PARAGRAPHS,
    SET_UP,
    SPAN_HEADER,
    TRACES,
    alert_rows,
    dashboard_parts,
    span_rows,
)
from published_page import PUBLISHED_HEADER, published_rows, published_summary
from pydantic import SecretStr
from results_page import (
    README_BEGIN,
    RESULT_BLOCKS,
    RESULT_HEADER,
    comparison_table,
    result_rows,
)
from routes_page import ROUTE_LIST_HEADER, ROUTES_LIST_BEGIN, route_list_rows

from rbln_backend.config import GRAPH, RblnConfig
from rbln_backend.reporting.declared_metrics import METRICS, MetricDecl
from rbln_backend.reporting.description import SECTIONS, KvGroupInfo
from rbln_backend.variables import KINDS, OPTION_NAMES, VARIABLES, Status, form_of
from server.observability.declarations import SERVER_METRICS
from server.observability.history import KEPT as HISTORY_KEPT
from server.observability.history import PERIOD_S as HISTORY_PERIOD_S
from server.observability.history import Sample
from server.request.endpoints import OPENINGS, ROUTES, Scope
from server.routes.server_info import SERVER_FIELDS
from server.settings import ENV_PREFIX, ServerSettings

DOCS = Path(__file__).resolve().parent
ROUTES_BEGIN = "<!-- Written by docs/generate.py from server/request/endpoints.py. -->"
FIELDS_BEGIN = "<!-- Written by docs/generate.py from server/request/tables.py. -->"
WRITTEN_END = "<!-- End of what is written by docs/generate.py. -->"
NOTICE = "<!-- Written by docs/generate.py from the code; edit the code, then run `make docs`. -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(description="Generate the reference pages from the code.")
    parser.add_argument("--check", action="store_true", help="fail if a page is stale")
    check = parser.parse_args(arguments).check
    stale = [
        path
        for path, text in pages().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if not check:
            path.write_text(pages()[path], encoding="utf-8")
        sys.stdout.write(f"{path.name}: {'stale, run `make docs`' if check else 'written'}\n")
    return 1 if check and stale else 0


def pages() -> dict[Path, str]:
    """Return each generated page and its text."""
    return {
        DOCS.parent / "README.md": readme_page(),
        DOCS / "configuration.md": configuration_page(),
        DOCS / "http_api.md": http_api_page(),
        DOCS / "metrics.md": metrics_page(),
        DOCS / "models.md": models_page(),
        DOCS / "observability.md": observability_page(),
        DOCS / "dev/results.md": results_page(),
        DOCS / "security.md": security_page(),
        DOCS / "server_info.md": server_info_page(),
        DOCS / "vllm_serve.md": vllm_serve_page(),
    }


def readme_page() -> str:
    """Return README: by hand, except the table of speed."""
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    return between(text, README_BEGIN, WRITTEN_END, "\n".join(comparison_table()))


def configuration_page() -> str:
    """Return the page of all settings."""
    return _page(
        "# Configuration",
        NOTICE,
        "Look up a setting, its default and its variable. "
        "Three things are configured: the engine by vLLM's own flags, the backend by `RblnConfig`, "
        "and the HTTP server by `ServerSettings`. A wrong name or value is refused at start, with "
        "the nearest known name or the allowed values.",
        "## Backend",
        'A field is set by `--additional-config \'{"rbln": {"<field>": <value>}}\'`, else by its '
        "variable, else its default applies. As in vllm-rbln, a field may also stand in "
        '`--additional-config` itself: `{"<field>": <value>}`. Other keys there are errors. '
        "Booleans of variables are `true`, `1`, `yes`, `on`, `false`, `0`, `no` or `off`. A field "
        "marked *graph* changes compiled graphs: another "
        "value needs other artifacts.",
        _table(("Field", "Values", "Default", "Meaning", "Variable"), _field_rows()),
        "### Environment variables",
        "All documented names of the RBLN stack for the backend. Unknown `VLLM_RBLN_*` names are "
        "errors; the RBLN SDK reads other `RBLN_*` names itself.",
        _table(("Variable", "Value", "Field", "Status", "Meaning or reason"), _variable_rows()),
        "### Options of vllm-rbln",
        "Keys of vllm-rbln 0.12's `additional_config` with other names are accepted, too.",
        _table(("Key", "Same as"), ((_code(k), _code(v)) for k, v in OPTION_NAMES.items())),
        "## Server",
        "A setting comes from its flag, else its variable, else the file of `--config`, else its "
        "default.",
        _table(("Flag", "Variable", "Values", "Default", "Meaning"), _setting_rows()),
    )


def metrics_page() -> str:
    """Return the page of all metrics."""
    header = ("Metric", "Kind", "Labels", "Meaning")
    return _page(
        "# Metrics",
        NOTICE,
        "Look up what a metric counts. `/metrics` serves three families: "
        "vLLM's own `vllm:*`, untouched and documented by vLLM; "
        "the server's; and the engine's, collected from all worker processes. Units are base "
        "units. Labels hold values of small closed sets, never a request id or a prompt.",
        "## Server",
        _table(header, map(_metric_row, SERVER_METRICS)),
        "## Engine",
        "Counters and histograms are sums over ranks. A gauge is the most recent, the largest or "
        "the sum of its ranks' values, as its kind says.",
        _table(header, map(_metric_row, METRICS)),
        "## Histogram buckets",
        _table(
            ("Metric", "Upper bounds"),
            (
                (_code(m.name), ", ".join(f"{bound:g}" for bound in m.buckets))
                for m in (*SERVER_METRICS, *METRICS)
                if m.buckets
            ),
        ),
    )


def models_page() -> str:
    """Return the page of model families."""
    results = load_results()
    return _page(
        "# Models",
        NOTICE,
        "Find out whether a model runs. "
        "Models run through vLLM's own model code, captured as one graph. Families have no code of "
        "their own here, except the text models of multimodal checkpoints "
        "(`rbln_backend/text_models/`). `rbln-serve check MODEL` reports within seconds whether a "
        "model can run, from its configuration and tokenizer alone; `rbln-serve serve` refuses the "
        "same models for the same reasons before it reads a weight.",
        "## Families that were compared with transformers",
        "A tiny member of each family with random weights (`tests/checkpoint_families.py`) "
        "continues prompts of one token to four windows greedily by 64 tokens in float32: each "
        "alone, in a batch of mixed lengths, and after a prefix hit. The columns count the tokens "
        "that equal those of transformers in float32 on the same weights; up to the first token "
        "that differs, the log-probabilities of the three most likely tokens are compared as well. "
        "All runs were on the emulated device, none on an NPU. "
        "`python docs/models.py [FAMILY ...]` measures again.",
        "\n".join(conditions(results)) or "Nothing was measured yet.",
        _table(HEADER, family_rows(results)),
        "## Published models",
        "Results of `rbln-serve check` on the `config.json` of published models, from their public "
        "pages (`docs/published_configs.json`), for the emulated device with enough memory. It "
        "reads no weights; the table above and the tests show whether a family computes the right "
        "tokens. `python docs/published.py` checks again. " + published_summary(),
        _table(PUBLISHED_HEADER, published_rows()),
        "## What is refused",
        "A refusal is one line: the feature, why this backend lacks it, and what to do instead.",
        _table(("Feature", "Known from", "The backend is one ...", "Instead"), refusal_rows()),
        "vLLM itself refuses unknown architectures and weight formats, contradictory sizes, and "
        "custom model code without `--trust-remote-code`.",
    )


def observability_page() -> str:
    """Return the page of traces, dashboards and alerts."""
    parts = [
        block
        for heading, picture, rows in dashboard_parts()
        for block in (heading, picture, _table(PANEL_HEADER, rows))
    ]
    return _page(
        "# Observability",
        NOTICE,
        PARAGRAPHS[0],
        SET_UP,
        *PARAGRAPHS[1:],
        "## Traces",
        *TRACES,
        _table(SPAN_HEADER, span_rows()),
        "## Alerts",
        "critical pages, warning needs attention on the same day, info is a hint. Each name links "
        "to its runbook; the expressions are in `deploy/prometheus/alerts.yml`.",
        _table(ALERT_HEADER, alert_rows()),
        "## Dashboards",
        *parts,
    )


def security_page() -> str:
    """Return the page of security: by hand, except the table of routes."""
    header = ("Routes", "No keys set", "API keys alone", "Admin keys too")
    return _with_written("security.md", ROUTES_BEGIN, _table(header, _route_rows()))


def http_api_page() -> str:
    """Return the page of the HTTP interface: by hand, except routes, errors and fields."""
    tables = (f"{head}\n\n{_table(FIELD_HEADER, rows)}" for head, rows in field_tables())
    text = _with_written("http_api.md", FIELDS_BEGIN, "\n\n".join(tables))
    text = between(text, ERRORS_BEGIN, WRITTEN_END, _table(ERROR_HEADER, error_rows()))
    routes = _table(ROUTE_LIST_HEADER, route_list_rows())
    return between(text, ROUTES_LIST_BEGIN, WRITTEN_END, routes)


def _with_written(name: str, begin: str, written: str) -> str:
    """Return a hand-written page with the text between its two marks replaced."""
    return between((DOCS / name).read_text(encoding="utf-8"), begin, WRITTEN_END, written)


def _route_rows() -> Iterable[tuple[str, ...]]:
    for scope, opens in OPENINGS.items():
        named = [_code(route.template) for route in ROUTES if route.scope is scope]
        if scope is Scope.ADAPTERS:
            named.append("`DELETE /v1/lora_adapters/{name}`")
        yield ", ".join(named), *opens


def server_info_page() -> str:
    """Return the page of `/v1/server_info`."""
    header = ("Field", "Type", "Meaning")
    parts: list[str] = []
    for name, section in {**SECTIONS, "kv.groups[]": KvGroupInfo}.items():
        parts += [f"## `{name}`", str(section.__doc__), _table(header, _section_rows(section))]
    return _page(
        "# `GET /v1/server_info`",
        NOTICE,
        "Query what a server runs and how, as one JSON object. "
        "It answers at any time, while the engine starts and after it died. Until the engine "
        "reports a section, it is null; `runtime` also on an NPU. Fields are added, never renamed. "
        "There are no secrets.",
        "## Top level",
        _table(("Field", "Meaning"), ((_code(name), doc) for name, doc in SERVER_FIELDS.items())),
        "The engine's sections follow.",
        *parts,
        "## `GET /v1/server_info/history`",
        f"The traffic of the last {HISTORY_PERIOD_S * HISTORY_KEPT / 60:g} minutes, as drawn by "
        "the console: samples in memory since the service became ready. The answer is an object "
        "with `period_s` (seconds between samples) and `samples`, the oldest first. "
        "`?after=NUMBER` skips samples up to that number. Counts divided by `seconds` are rates.",
        _table(header, _section_rows(Sample)),
    )


def results_page() -> str:
    """Return the page of result files."""
    title, before, after = RESULT_BLOCKS
    return _page(title, NOTICE, before, _table(RESULT_HEADER, result_rows()), after)


def vllm_serve_page() -> str:
    """Return the page of routes and flags of `vllm serve` that this server lacks."""
    return _page(
        "# Moving from `vllm serve`",
        NOTICE,
        upstream_page.INTRODUCTION,
        "## Absent routes",
        _table(upstream_page.ROUTE_HEADER, upstream_page.absent_route_rows()),
        "## Flags with another name or nothing to do",
        _table(upstream_page.ACCEPTED_HEADER, upstream_page.accepted_flag_rows()),
        "## Flags of which some values are refused",
        _table(upstream_page.ACCEPTED_HEADER, upstream_page.checked_flag_rows()),
        "## Flags as in vLLM",
        _table(upstream_page.HONOURED_HEADER, upstream_page.honoured_flag_rows()),
        "## Refused flags",
        _table(upstream_page.FLAG_HEADER, upstream_page.refused_flag_rows()),
        "Settings of the same name in both (`--host`, `--api-key`, `--ssl-keyfile` and others) are "
        "in [configuration.md](configuration.md#server). What the engine refuses, such as "
        "`--enforce-eager`, is in [documents.md](dev/documents.md) and "
        "[models.md](models.md#what-is-refused).",
    )


def _section_rows(section: type) -> Iterable[tuple[str, ...]]:
    for name, hint in get_type_hints(section, include_extras=True).items():
        assert get_origin(hint) is Annotated, name
        kind, doc = get_args(hint)
        yield _code(name), _json_kind(kind), doc


def _json_kind(annotation: object) -> str:
    """Return the JSON type of an answer's field in words."""
    if get_origin(annotation) is list:
        return "list"
    names = {str: "text", int: "integer", float: "number", bool: "boolean", type(None): "null"}
    parts = get_args(annotation) or (annotation,)
    return " or ".join(names[part] for part in parts)


def _field_rows() -> Iterable[tuple[str, ...]]:
    for name, field in RblnConfig.model_fields.items():
        names = [
            _code(variable.name)
            for variable in VARIABLES
            if variable.field == name and variable.status is not Status.ALIAS
        ]
        doc = " ".join(str(field.description).split())
        yield (
            _code(name),
            form_of(KINDS[name]).json,
            _default(field.default),
            f"{doc} *graph*" if GRAPH in field.metadata else doc,
            ", ".join(names),
        )


def _variable_rows() -> Iterable[tuple[str, ...]]:
    for variable in sorted(VARIABLES, key=lambda variable: variable.name):
        target = _code(variable.field) if variable.field else ""
        status = variable.status.value
        if variable.status is Status.REFUSED:
            accepted = str(variable.accepts).lower()
            status = f"refused unless {_code(accepted)}"
        yield _code(variable.name), variable.form.text, target, status, variable.doc


def _setting_rows() -> Iterable[tuple[str, ...]]:
    for name, setting in ServerSettings.model_fields.items():
        yield (
            _code("--" + name.replace("_", "-")),
            _code(ENV_PREFIX + name.upper()),
            _kind(setting.annotation),
            _default(setting.default),
            setting.description or "",
        )


def _metric_row(metric: MetricDecl) -> tuple[str, ...]:
    merges = metric.kind == "gauge" and metric.across_ranks != "mostrecent"
    kind = f"{metric.kind}, {metric.across_ranks}" if merges else metric.kind
    return _code(metric.name), kind, ", ".join(map(_code, metric.labels)), metric.help


def _kind(annotation: object) -> str:
    """Return the accepted values of a server setting in words."""
    if get_origin(annotation) is Literal:
        return ", ".join(_code(str(choice)) for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {_kind(get_args(annotation)[0])}"
    inner = [part for part in get_args(annotation) if part is not type(None)] or [annotation]
    names: dict[object, str] = {str: "text", int: "integer", float: "number", bool: "boolean"}
    names |= {Path: "path", SecretStr: "text that is never shown"}
    return " or ".join(names.get(part, str(part)) for part in inner)


def _default(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return _code(str(value).lower())
    return _code(str(list(value) if isinstance(value, tuple) else value))


def _code(text: str) -> str:
    return f"`{text}`"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _page(*blocks: str) -> str:
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    sys.exit(main())
