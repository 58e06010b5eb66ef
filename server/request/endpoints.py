"""Forms of each endpoint's requests, and the kinds of their fields.

Several endpoints accept prompts or conversations in one of several fields. The form of a request is
inferred from the fields present, so that errors are about that form only. Pure data and functions;
tests/server/request/test_endpoints.py compares the tables with vLLM's request models.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from server.wire.endpoint import Endpoint, JsonObject


@dataclass(frozen=True, slots=True)
class PromptField:
    """A field with prompts; `counted`: each of its prompts has an answer.

    Errors about a too long prompt name the first counted field of the body.
    """

    name: str
    counted: bool = True


def _fields(*names: str, counted: bool = True) -> tuple[PromptField, ...]:
    return tuple(PromptField(name, counted) for name in names)


_CONVERSATION = _fields("messages")
_ITEMS = _fields("input") + _fields("instructions", "previous_input_messages", counted=False)
_POOLED = _fields("messages", "input")
_SCORED = (
    *_fields("documents", "items", "data_2", "text_2"),
    *_fields("query", "queries", "data_1", "text_1", counted=False),
)

PROMPTS: Mapping[Endpoint, tuple[PromptField, ...]] = {
    Endpoint.CHAT: _CONVERSATION,
    Endpoint.COMPLETION: _fields("prompt") + _fields("suffix", counted=False),
    Endpoint.RESPONSES: _ITEMS,
    Endpoint.INPUT_TOKENS: _ITEMS,
    Endpoint.COMPACT: _ITEMS,
    Endpoint.MESSAGES: _CONVERSATION + _fields("system", counted=False),
    Endpoint.COUNT_TOKENS: _CONVERSATION + _fields("system", counted=False),
    Endpoint.TOKENIZE: _fields("messages", "prompt"),
    Endpoint.DETOKENIZE: _fields("tokens"),
    Endpoint.EMBEDDINGS: _POOLED,
    Endpoint.COHERE_EMBED: _fields("texts", "inputs", "images"),
    Endpoint.POOLING: _POOLED,
    Endpoint.CLASSIFY: _POOLED,
    **dict.fromkeys((Endpoint.SCORE, Endpoint.SCORE_V1), _SCORED),
    **dict.fromkeys((Endpoint.RERANK, Endpoint.RERANK_V1, Endpoint.RERANK_V2), _SCORED),
}
"""Fields with the prompts of an endpoint's requests, in the order of their checks."""


class FieldKind(enum.Enum):
    """Kind of a field's content, which selects its size limits in `server.request.budget`."""

    CONVERSATION = "conversation"
    """Messages with their parts and calls; or a text."""
    PROMPTS = "prompts"
    """A text, token ids, or a list of either."""
    TOKENS = "tokens"
    """Token ids of one text."""
    IDS = "ids"
    """Token ids of an option."""
    TOOLS = "tools"
    """Declarations of tools with their schemas."""
    GRAMMAR = "grammar"
    """Constraints of an answer; the gate of structured outputs has further limits."""
    WORDS = "words"
    """A few short texts."""
    OPTIONS = "options"
    """An object of options, or of a client's own labels."""
    NAME = "name"
    """A short text."""
    TEMPLATE = "template"
    """A chat template."""


FIELD_KINDS: Mapping[str, FieldKind] = {
    **dict.fromkeys(("messages", "previous_input_messages", "system"), FieldKind.CONVERSATION),
    "prediction": FieldKind.CONVERSATION,
    **dict.fromkeys(("prompt", "input", "inputs", "texts", "images"), FieldKind.PROMPTS),
    **dict.fromkeys(("documents", "items", "query", "queries"), FieldKind.PROMPTS),
    **dict.fromkeys(("data_1", "data_2", "text_1", "text_2"), FieldKind.PROMPTS),
    **dict.fromkeys(("suffix", "instruction", "instructions"), FieldKind.PROMPTS),
    "prompt_embeds": FieldKind.PROMPTS,
    "tokens": FieldKind.TOKENS,
    **dict.fromkeys(("allowed_token_ids", "logprob_token_ids", "stop_token_ids"), FieldKind.IDS),
    "logit_bias": FieldKind.IDS,
    "tools": FieldKind.TOOLS,
    **dict.fromkeys(
        ("structured_outputs", "response_format", "output_config", "text"), FieldKind.GRAMMAR
    ),
    **dict.fromkeys(("stop", "stop_sequences", "bad_words"), FieldKind.WORDS),
    **dict.fromkeys(("include", "embedding_types"), FieldKind.WORDS),
    **dict.fromkeys(("metadata", "vllm_xargs", "reasoning", "tool_choice"), FieldKind.OPTIONS),
    **dict.fromkeys(("chat_template_kwargs", "media_io_kwargs"), FieldKind.OPTIONS),
    **dict.fromkeys(("mm_processor_kwargs", "repetition_detection"), FieldKind.OPTIONS),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), FieldKind.OPTIONS),
    "stream_options": FieldKind.OPTIONS,
    **dict.fromkeys(("cache_salt", "input_type", "model", "user"), FieldKind.NAME),
    **dict.fromkeys(("previous_response_id", "prompt_cache_key"), FieldKind.NAME),
    **dict.fromkeys(("request_id", "session_id"), FieldKind.NAME),
    "chat_template": FieldKind.TEMPLATE,
}
"""Kinds of all fields of the request models but numbers and words of a list."""

_OTHER_FIELD_KINDS: Mapping[tuple[Endpoint, str], FieldKind] = {
    **{
        (endpoint, "input"): FieldKind.CONVERSATION for endpoint in Endpoint if endpoint.takes_items
    },
    **{(endpoint, "prompt"): FieldKind.OPTIONS for endpoint in Endpoint if endpoint.takes_items},
    # Documents that a chat template shows, not prompts.
    (Endpoint.CHAT, "documents"): FieldKind.CONVERSATION,
}
"""Exceptions by endpoint: fields of the same name and another kind."""


def kind_of_field(endpoint: Endpoint, name: str) -> FieldKind:
    """Return the kind of a field; OPTIONS for one that is in no table."""
    return _OTHER_FIELD_KINDS.get((endpoint, name)) or FIELD_KINDS.get(name, FieldKind.OPTIONS)


def prompt_fields(endpoint: Endpoint, body: JsonObject) -> list[str]:
    """Return the names of the fields of `body` that hold prompts."""
    return [field.name for field in PROMPTS[endpoint] if field.name in body]


def error_field(endpoint: Endpoint, body: JsonObject) -> str | None:
    """Return the field that errors about a too long prompt name, or None."""
    return next((f.name for f in PROMPTS[endpoint] if f.counted and f.name in body), None)


def answers_in(endpoint: Endpoint, body: JsonObject) -> int:
    """Return the number of answers of a body, `n` for each prompt; 1 where `n` is invalid."""
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
    is_one = isinstance(first, int) or _is_message(first)
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
    if _is_message(first):
        return "_chat_input"
    return "_chats_input" if _is_message(_first(first)) else ""


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) and value else None
