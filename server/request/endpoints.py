"""Forms of each endpoint's requests.

Several endpoints accept prompts or conversations in one of several fields. The form of a request is
inferred from the fields present, so that errors are about that form only. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from server.request.fields.lookup import error_field
from server.wire.endpoint import Endpoint, JsonObject


def answers_in(endpoint: Endpoint, body: JsonObject) -> int:
    """Return the number of answers of a body, `n` for each prompt; 1 where `n` is invalid.

    A rendered request has one: nothing is generated.
    """
    if endpoint.renders:
        return 1
    n = body.get("n")
    answers = n if type(n) is int and n > 1 else 1
    if endpoint is Endpoint.COMPLETION or endpoint.pools:
        counted = error_field(endpoint, body)
        answers *= 1 if counted is None else _prompts(body[counted])
    return answers


def _prompts(value: object) -> int:
    """Return the number of prompts: each is a text, a list of token ids or a list of messages."""
    if not isinstance(value, list) or not value:
        return 1
    first = value[0]
    is_one = isinstance(first, int) or is_message(first)
    return 1 if is_one else len(value)


_SAME: Mapping[Endpoint, Endpoint] = {
    Endpoint.SCORE_V1: Endpoint.SCORE,
    Endpoint.RERANK_V1: Endpoint.RERANK,
    Endpoint.RERANK_V2: Endpoint.RERANK,
}
"""Paths that are other names of an endpoint."""

_SCORED_PAIRS = (("items", "score_items"), ("data_1", "score_data"), ("text_1", "score_text"))


def request_form(endpoint: Endpoint, body: JsonObject) -> str:
    """Return the name of the form: the endpoint's, with a suffix where it has several."""
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
    """Return the suffix of embeddings of one or several conversations, in `messages` or `input`."""
    if "messages" in body:
        return "_chats" if isinstance(_first(body["messages"]), list) else "_chat"
    first = _first(body.get("input"))
    if is_message(first):
        return "_chat_input"
    return "_chats_input" if is_message(_first(first)) else ""


def is_message(value: object) -> bool:
    """Return True for a message of a conversation."""
    return isinstance(value, dict) and "role" in value


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) and value else None
