"""Tables of the APIs' fields for docs/http_api.md: one per API, one row per rule and reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from server.request.fields import Field, FieldAction
from server.request.tables import FIELDS, RENDERED_CHAT
from server.wire.endpoint import Endpoint

FIELD_HEADER = ("Fields", "", "Why, or how")
_TITLES = {
    Endpoint.MESSAGES: "`/v1/messages`, `/v1/messages/count_tokens`",
    Endpoint.CHAT: "`/v1/chat/completions`",
    Endpoint.RESPONSES: "`/v1/responses`",
    Endpoint.INPUT_TOKENS: "`/v1/responses/input_tokens`",
    Endpoint.COMPACT: "`/v1/responses/compact`",
    Endpoint.COMPLETION: "`/v1/completions`",
}
_RENDERED = "`/v1/chat/completions/render`, `/v1/completions/render`: differences"
_REST = (Endpoint.EMBEDDINGS, "All others")


def field_tables() -> Iterable[tuple[str, Sequence[tuple[str, ...]]]]:
    """Yield each table's heading and rows."""
    for endpoint, title in _TITLES.items():
        yield f"### {title}", _rows(FIELDS[endpoint])
    yield f"### {_RENDERED}", _rows(RENDERED_CHAT)
    yield f"### {_REST[1]}", _rows(FIELDS[_REST[0]])


def _rows(fields: Sequence[Field]) -> Sequence[tuple[str, ...]]:
    groups: dict[tuple[FieldAction, str, str], list[str]] = {}
    for row in fields:
        if row.action is None:
            continue
        groups.setdefault((row.action, row.why, _exception(row)), []).append(row.path)
    return [
        (", ".join(f"`{path}`" for path in paths), treatment.value, f"{why}{exception}")
        for (treatment, why, exception), paths in sorted(groups.items(), key=_order)
    ]


def _order(group: tuple[tuple[FieldAction, str, str], list[str]]) -> int:
    return list(FieldAction).index(group[0][0])


def _exception(row: Field) -> str:
    """Return the values that pass, or the items to which a row applies."""
    if row.when:
        return f"; where it is `{json.dumps(dict(row.when))}`"
    if row.only:
        return f"; where it is {' or '.join(f'`{json.dumps(value)}`' for value in row.only)}"
    if not row.same:
        return ""
    values = " or ".join(f"`{json.dumps(value)}`" for value in row.same)
    return f"; {values} passes" if len(row.same) == 1 else f"; {values} pass"
