"""Pages of the input items of a stored response."""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from server.errors import NotFoundError, describe
from server.storage.raw_json import all_fields_of, decode, fields_of, string_of
from server.storage.responses.response import Response
from server.storage.rows import Page

_MESSAGE = "message"


def page_of_items(response: Response, page: Page) -> tuple[list[dict[str, Any]], bool]:
    """Return a page of the items, and whether more follow. Raises `NotFoundError`."""
    items = [bytes(item) for item in decode(response.input, list[Raw])]
    numbers = list(range(len(items)))
    if page.newest_first:
        numbers.reverse()
    if page.after is not None:
        ids = [_id_of(response.id, number, items[number]) for number in numbers]
        if page.after not in ids:
            raise NotFoundError(
                f"'after' is {describe(page.after)}, which is not there.", param="after"
            )
        numbers = numbers[ids.index(page.after) + 1 :]
    shown = [_shown(response.id, number, items[number]) for number in numbers[: page.limit]]
    return shown, len(numbers) > page.limit


def _id_of(response_id: str, number: int, item: bytes) -> str:
    """Return the id of an item; items without one get an id from their number."""
    if item[:1] != b"{":
        return f"msg_{number}"
    fields = fields_of(item, "id", "type")
    if given := string_of(fields.get("id")):
        return given
    prefix = "msg" if _kind(fields.get("type")) == _MESSAGE else "item"
    return f"{prefix}_{response_id.removeprefix('resp_')}_{number}"


def _kind(given: bytes | Raw | None) -> str:
    return string_of(None if given is None else bytes(given)) or _MESSAGE


def _shown(response_id: str, number: int, item: bytes) -> dict[str, Any]:
    identity = _id_of(response_id, number, item)
    if item[:1] != b"{":
        return {"type": _MESSAGE, "id": identity, "content": Raw(item)}
    fields: dict[str, Any] = dict(all_fields_of(item))
    kind = _kind(fields.get("type"))
    shown = {"type": kind, **fields, "id": identity}
    if not string_of(bytes(fields.get("type", b"null"))):
        shown["type"] = kind
    if kind == _MESSAGE:
        shown.setdefault("status", "completed")
        content = fields.get("content")
        if content is not None and bytes(content)[:1] == b'"':
            shown["content"] = [_text_part(fields, content)]
    return shown


def _text_part(fields: dict[str, Any], content: Raw) -> dict[str, Any]:
    if string_of(bytes(fields.get("role", b"null"))) == "assistant":
        return {"type": "output_text", "text": content, "annotations": []}
    return {"type": "input_text", "text": content}
