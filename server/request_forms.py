"""Which of an endpoint's request forms a body has.

Several endpoints take prompts or conversations, under one of several names. A body is told by
what it holds, so that a complaint about it is about that form alone. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable

from server.frontend import Endpoint, JsonObject

_SAME: dict[Endpoint, Endpoint] = {
    Endpoint.SCORE_V1: Endpoint.SCORE,
    Endpoint.RERANK_V1: Endpoint.RERANK,
    Endpoint.RERANK_V2: Endpoint.RERANK,
}
"""Paths that are other names of an endpoint."""

_SCORED_PAIRS = (("items", "score_items"), ("data_1", "score_data"), ("text_1", "score_text"))


def request_form(endpoint: Endpoint, body: JsonObject) -> str:
    """Return the name of the form: the endpoint's, with what sets the form apart behind it."""
    endpoint = _SAME.get(endpoint, endpoint)
    name = endpoint.name.lower()
    if endpoint is Endpoint.EMBEDDINGS:
        return name + _conversation_suffix(body)
    if endpoint in (Endpoint.TOKENIZE, Endpoint.POOLING, Endpoint.CLASSIFY):
        return f"{name}_chat" if "messages" in body else name
    if endpoint is Endpoint.SCORE:
        return next((form for field, form in _SCORED_PAIRS if field in body), name)
    return name


def forms_of(endpoint: Endpoint, known: Iterable[str]) -> list[str]:
    """Return the names of those `known` forms that are the endpoint's."""
    name = _SAME.get(endpoint, endpoint).name.lower()
    return [form for form in known if form == name or form.startswith(f"{name}_")]


def _conversation_suffix(body: JsonObject) -> str:
    """Embeddings take one or several conversations, as `messages` or as `input`."""
    if "messages" in body:
        return "_chats" if isinstance(_first(body["messages"]), list) else "_chat"
    first = _first(body.get("input"))
    if _is_message(first):
        return "_chat_input"
    return "_chats_input" if _is_message(_first(first)) else ""


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) and value else None
