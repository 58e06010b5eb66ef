"""Rewrite the tables of the pages that come from the code or from saved results.

A table stands between `<!-- generated: NAME -->` and `<!-- /generated -->`; everything else in a
page is written by hand. `python docs/generate.py` rewrites the tables; with `--check` it changes
nothing and exits with 1 when a table is stale, or a page lacks a route.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import saved_tables
from pydantic import SecretStr
from saved_tables import code, table
from upstream_routes import absent_routes

from rbln_backend.config import GRAPH, RblnConfig
from rbln_backend.limits import FEATURES
from rbln_backend.reports.info import SECTIONS, KvGroupInfo
from rbln_backend.reports.metrics import METRICS, MetricDecl
from rbln_backend.settings import (
    KINDS,
    KNOWN_SDK,
    NEXT_SDK,
    OPTION_NAMES,
    SDK_RULES,
    VARIABLES,
    Status,
    get_form,
)
from server.errors import ServerError
from server.observability.metrics import SERVER_METRICS
from server.observability.traffic import Sample
from server.request.endpoints import OPENINGS, ROUTES, Scope
from server.request.tables import FIELDS, RENDERED_CHAT, Field, FieldAction
from server.routes.server_info import SERVER_FIELDS
from server.settings import ENV_PREFIX, ServerSettings
from server.vllm import flag_table
from server.wire import Endpoint

DOCS = Path(__file__).resolve().parent
_TABLE = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(description="Generate the tables of the pages.")
    parser.add_argument("--check", action="store_true", help="fail if a page is stale")
    check = parser.parse_args(arguments).check
    used: set[str] = set()
    stale = []
    for path in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        used |= {match[2] for match in _TABLE.finditer(text)}
        written = _TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)
        if written != text:
            stale.append(path)
            if not check:
                path.write_text(written, encoding="utf-8")
    for path in stale:
        sys.stdout.write(f"{path.name}: {'stale, run `make docs`' if check else 'written'}\n")
    faults = [*(f"no page has the table {name}" for name in sorted(TABLES.keys() - used))]
    faults += _unlisted("http_api.md", (route.template for route in ROUTES))
    faults += _unlisted("vllm_serve.md", absent_routes({route.template for route in ROUTES}))
    for fault in faults:
        sys.stdout.write(f"{fault}\n")
    return 1 if faults or (check and stale) else 0


def _unlisted(page: str, routes: Iterable[str]) -> Iterator[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    for route in routes:
        if not re.search(rf"[ `]{re.escape(route)}`", text):
            yield f"{page} lacks the route {route}"


def _backend_fields() -> str:
    rows = []
    for name, field in RblnConfig.model_fields.items():
        names = [
            code(variable.name)
            for variable in VARIABLES
            if variable.field == name and variable.status is not Status.ALIAS
        ]
        doc = " ".join(str(field.description).split())
        meaning = f"{doc} *graph*" if GRAPH in field.metadata else doc
        default = _default(field.default)
        rows.append((code(name), get_form(KINDS[name]).json, default, meaning, ", ".join(names)))
    return table(("Field", "Values", "Default", "Meaning", "Variable"), rows)


def _backend_variables() -> str:
    rows = []
    for variable in sorted(VARIABLES, key=lambda variable: variable.name):
        target = code(variable.field) if variable.field else ""
        status = variable.status.value
        if variable.status is Status.REFUSED:
            status = f"refused unless {code(str(variable.accepts).lower())}"
        rows.append((code(variable.name), variable.form.text, target, status, variable.doc))
    return table(("Variable", "Value", "Field", "Status", "Meaning or reason"), rows)


def _sdk_releases() -> str:
    rows = ((code(rule.name), rule.known, rule.later) for rule in SDK_RULES.values())
    return table(("Name", f"SDK {KNOWN_SDK}", f"From SDK {NEXT_SDK}"), rows)


def _settings() -> str:
    return table(
        ("Flag", "Variable", "Values", "Default", "Meaning"),
        (
            (
                code("--" + name.replace("_", "-")),
                code(ENV_PREFIX + name.upper()),
                _kind(setting.annotation),
                _default(setting.default),
                " ".join((setting.description or "").split()),
            )
            for name, setting in ServerSettings.model_fields.items()
        ),
    )


def _kind(annotation: object) -> str:
    """Return the accepted values of a server setting in words."""
    if get_origin(annotation) is Literal:
        return ", ".join(code(str(choice)) for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {_kind(get_args(annotation)[0])}"
    if inner := [part for part in get_args(annotation) if part is not type(None)]:
        return " or ".join(_kind(part) for part in inner)
    names: dict[object, str] = {str: "text", int: "integer", float: "number", bool: "boolean"}
    return (names | {Path: "path", SecretStr: "text that is never shown"})[annotation]


def _default(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return code(str(value).lower())
    return code(str(list(value) if isinstance(value, tuple) else value))


def _metrics(metrics: Sequence[MetricDecl]) -> str:
    rows = []
    for metric in metrics:
        merges = metric.kind == "gauge" and metric.across_ranks != "mostrecent"
        kind = f"{metric.kind}, {metric.across_ranks}" if merges else metric.kind
        rows.append((code(metric.name), kind, ", ".join(map(code, metric.labels)), metric.help))
    return table(("Metric", "Kind", "Labels", "Meaning"), rows)


def _buckets() -> str:
    metrics = [metric for metric in (*SERVER_METRICS, *METRICS) if metric.buckets]
    return table(
        ("Metric", "Upper bounds"),
        ((code(m.name), ", ".join(f"{bound:g}" for bound in m.buckets or ())) for m in metrics),
    )


def _refusals() -> str:
    rows = ((f.name, f.known_from, f.why, f.instead) for f in FEATURES)
    return table(("Feature", "Known from", "The backend is one ...", "Instead"), rows)


def _errors() -> str:
    rows = []
    for cls in sorted(_error_classes(ServerError), key=lambda cls: cls.status):
        meaning = " ".join(str(cls.__doc__).partition("\n\n")[0].split())
        # What follows a name of the code is for its readers.
        short = meaning.partition("; `")[0].rstrip(".")
        rows.append((str(cls.status), code(cls.code), code(cls.error_type), short))
    return table(("Status", "`code`", "`type`", "Meaning"), rows)


def _error_classes(cls: type[ServerError]) -> Iterator[type[ServerError]]:
    """Yield a class and its subclasses that have a code of their own."""
    if "code" in vars(cls) and cls is not ServerError:
        yield cls
    for subclass in cls.__subclasses__():
        yield from _error_classes(subclass)


def _route_access() -> str:
    rows = []
    for scope, opens in OPENINGS.items():
        names = [code(route.template) for route in ROUTES if route.scope is scope]
        if scope is Scope.ADAPTERS:
            names.append("`DELETE /v1/lora_adapters/{name}`")
        rows.append((", ".join(names), *opens))
    return table(("Routes", "No keys set", "API keys alone", "Admin keys too"), rows)


_APIS: Mapping[str, Sequence[Field]] = {
    "`/v1/chat/completions`": FIELDS[Endpoint.CHAT],
    "`/v1/completions`": FIELDS[Endpoint.COMPLETION],
    "`/v1/responses`": FIELDS[Endpoint.RESPONSES],
    "`…/input_tokens`": FIELDS[Endpoint.INPUT_TOKENS],
    "`…/compact`": FIELDS[Endpoint.COMPACT],
    "`/v1/messages`": FIELDS[Endpoint.MESSAGES],
    "`…/render`": RENDERED_CHAT,
    "others": FIELDS[Endpoint.EMBEDDINGS],
}
_Rule = tuple[FieldAction, str]


def _fields() -> str:
    """Return the rules of several APIs as one table, then those of each API alone.

    Fields that are obeyed as documented are left out.
    """
    apis: dict[tuple[_Rule, str], list[str]] = {}
    for api, fields in _APIS.items():
        for row in fields:
            if row.action is None or (row.action is FieldAction.OBEYED and not row.why):
                continue
            if api == "`/v1/completions`" and row.path.startswith("messages[]"):
                continue
            rule = (row.action, f"{row.why}{_exception(row)}")
            apis.setdefault((rule, row.path), []).append(api)
    groups: dict[tuple[tuple[str, ...], _Rule], list[str]] = {}
    for (rule, path), names in apis.items():
        groups.setdefault((tuple(names), rule), []).append(path)
    order = list(FieldAction)
    rows = sorted(groups.items(), key=lambda group: order.index(group[0][1][0]))
    parts = [_field_table("Several APIs", [row for row in rows if len(row[0][0]) > 1])]
    parts += [_field_table(api, [row for row in rows if row[0][0] == (api,)]) for api in _APIS]
    return "\n\n".join(parts)


def _field_table(title: str, rows: Sequence[tuple[Any, list[str]]]) -> str:
    cells = []
    for (names, (action, why)), paths in rows:
        apis = (", ".join(names),) if len(names) > 1 else ()
        cells.append((", ".join(map(code, paths)), action.value, why, *apis))
    header = ("Fields", "Rule", "Why, or how") + (("APIs",) if title == "Several APIs" else ())
    return f"### {title}\n\n{table(header, cells)}"


def _exception(row: Field) -> str:
    """Return the values that pass, or the items to which a row applies."""
    if row.when:
        return f"; where it is {code(json.dumps(dict(row.when)))}"
    if row.only:
        return f"; where it is {' or '.join(code(json.dumps(value)) for value in row.only)}"
    if not row.same:
        return ""
    values = " or ".join(code(json.dumps(value)) for value in row.same)
    return f"; {values} passes" if len(row.same) == 1 else f"; {values} pass"


def _server_info() -> str:
    parts = []
    for name, section in {**SECTIONS, "kv.groups[]": KvGroupInfo}.items():
        parts += [f"## `{name}`", str(section.__doc__), _members(section)]
    return "\n\n".join(parts)


def _members(section: type) -> str:
    rows = []
    for name, hint in get_type_hints(section, include_extras=True).items():
        assert get_origin(hint) is Annotated, name
        kind, doc = get_args(hint)
        rows.append((code(name), _json_kind(kind), doc))
    return table(("Field", "Type", "Meaning"), rows)


def _json_kind(annotation: object) -> str:
    if get_origin(annotation) is list:
        return "list"
    names = {str: "text", int: "integer", float: "number", bool: "boolean", type(None): "null"}
    parts = get_args(annotation) or (annotation,)
    return " or ".join(names[part] for part in parts)


def _by_text(flags: Mapping[str, str], header: Sequence[str]) -> str:
    by_text: dict[str, list[str]] = {}
    for name, text in flags.items():
        by_text.setdefault(text, []).append(_flag(name))
    return table(header, ((", ".join(names), text) for text, names in by_text.items()))


def _renamed_flags() -> str:
    renamed = {name: _flag(own) for name, own in flag_table.RENAMED_FLAGS.items()}
    return _by_text({**renamed, **flag_table.FULFILLED_FLAGS}, ("Flags", "Here"))


def _honoured_flags() -> str:
    flags = flag_table.HONOURED_FLAGS.items()
    rows = ((about, ", ".join(map(_flag, names))) for about, names in flags)
    return table(("About", "Flags"), rows)


def _flag(name: str) -> str:
    return code("--" + name.replace("_", "-"))


TABLES: Mapping[str, Callable[[], str]] = {
    "alerts": saved_tables.alerts,
    "backend-fields": _backend_fields,
    "backend-options": lambda: table(
        ("Key", "Same as"), ((code(key), code(field)) for key, field in OPTION_NAMES.items())
    ),
    "backend-variables": _backend_variables,
    "sdk-releases": _sdk_releases,
    "checked-flags": lambda: _by_text(flag_table.CHECKED_FLAGS, ("Flags", "Here")),
    "comparisons": saved_tables.comparisons,
    "engine-metrics": lambda: _metrics(METRICS),
    "errors": _errors,
    "fields": _fields,
    "histogram-buckets": _buckets,
    "history": lambda: _members(Sample),
    "honoured-flags": _honoured_flags,
    "published-models": saved_tables.published_models,
    "refusals": _refusals,
    "refused-flags": lambda: _by_text(flag_table.REFUSED_FLAGS, ("Flags", "Why they are refused")),
    "renamed-flags": _renamed_flags,
    "result-files": saved_tables.result_files,
    "route-access": _route_access,
    "server-info": _server_info,
    "server-info-top": lambda: table(
        ("Field", "Meaning"), ((code(name), doc) for name, doc in SERVER_FIELDS.items())
    ),
    "server-metrics": lambda: _metrics(SERVER_METRICS),
    "settings": _settings,
    "speed": saved_tables.speed,
}

if __name__ == "__main__":
    sys.exit(main())
