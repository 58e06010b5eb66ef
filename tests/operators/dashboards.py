"""The dashboards of deploy/grafana, read from their files."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.architecture.source_tree import ROOT

FILES = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
DASHBOARDS: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in FILES]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a dashboard without its row headings."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def variables() -> list[dict[str, Any]]:
    return [variable for one in DASHBOARDS for variable in one["templating"]["list"]]


# ------------------------------------------------------------------------------------- promql names
_TOKEN = re.compile(
    r"""\s+ | (?P<string>"(?:[^"\\]|\\.)*") | (?P<range>\[[^\]]*\])
    | (?P<name>[A-Za-z_:][\w:]*) | (?P<number>\d[\w.]*) | (?P<sign>[!=]~|[!=<>]=|.)""",
    re.VERBOSE,
)
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
# An aggregation's name stands before these or a parenthesis, a metric's never does.
_AGGREGATED = {"by", "without"}
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}


@dataclass(frozen=True)
class Names:
    """What an expression names: labels matched on by metric, and labels it groups or joins by."""

    metrics: dict[str, set[str]] = field(default_factory=dict)
    grouped: set[str] = field(default_factory=set)


def names_of(expr: str) -> Names:
    """Return the names of a valid expression without Grafana's variables."""
    tokens = [(m.lastgroup or "", m.group()) for m in _TOKEN.finditer(expr) if m.group().strip()]
    found = Names()
    stream = iter(enumerate(tokens))
    for place, (kind, text) in stream:
        following = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        if kind != "name" or text.lower() in _WORDS:
            continue
        if text in _GROUPING:
            if following == "(":
                found.grouped.update(_names_up_to(")", stream))
        elif following != "(" and following not in _AGGREGATED:
            matched = found.metrics.setdefault(text, set())
            if following == "{":
                matched.update(_names_up_to("}", stream))
    return found


def _names_up_to(end: str, stream: Iterator[tuple[int, tuple[str, str]]]) -> Iterator[str]:
    for _, (kind, text) in stream:
        if text == end:
            return
        if kind == "name":
            yield text
