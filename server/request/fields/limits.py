"""Limits of values, by kind of field, checked before the engine gets them.

vLLM lacks these checks, makes them deep inside the engine, or omits the limit from its message.
Pure functions over the body; wrong types are left to the request models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from server.errors import (
    ContextLengthError,
    InvalidSchemaError,
    InvalidValueError,
    MissingFieldError,
    OverloadedError,
    UnsupportedFieldError,
    describe,
)
from server.request.endpoints import is_message
from server.request.fields.field import FieldKind
from server.request.fields.kv_transfer import check_kv_transfer
from server.request.fields.lookup import fields_by_name, fields_of_kind, prompt_fields
from server.request.scheduling import check_priority
from server.wire.endpoint import Endpoint, JsonObject

_MAX_BIAS = 100
_ARGUMENTS = ("parameters", "input_schema")
"""Fields of a tool with the schema of its arguments: OpenAI's, Anthropic's."""
_ENCODINGS = ("float", "base64")
_RESERVED_ARGS = frozenset(("kv_transfer_params", "ec_transfer_params", "speculation"))
"""Keys that vLLM and this server set, or reject as fields."""
REPORT_MODE = "kv_cache_report_mode"
"""The key that selects the KV events of a request."""
_REPORT_MODES = ("incremental", "full")
_MEDIA = frozenset(
    (
        *("image", "image_url", "input_image", "image_pil", "image_embeds", "images"),
        *("audio_url", "input_audio", "audio_embeds", "video_url", "video_embeds"),
    )
)
"""Types of content parts, and the fields that hold them if `type` is omitted."""
_MIN_TEXT_CHARS = 1 << 20
_CHARS_PER_TOKEN = 16
"""Characters per token of the context: a longer text does not fit, except in rare scripts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of one server; lengths are in tokens."""

    max_messages: int
    max_prompts: int
    max_tools: int
    max_n: int
    max_stop: int
    max_logit_bias: int
    max_model_len: int
    vocab_size: int
    """One more than the last id that the tokenizer has a token for."""
    max_queued_tokens: int | None
    has_priorities: bool
    transfers_kv: bool = False
    missing_ids: frozenset[int] = frozenset()
    """Ids without a token."""
    extra_args: frozenset[str] | None = frozenset()
    """Accepted keys of `vllm_xargs`; None accepts any but those of `_RESERVED_ARGS`."""
    max_logprobs: int = 20
    """Most log-probabilities of a token; -1: as many as the vocabulary has tokens."""
    dimensions: range | tuple[int, ...] = ()
    """Lengths that an embedding may be cut to; empty for a model that was not trained for it."""

    @property
    def text_chars(self) -> int:
        """Most characters of one text."""
        return max(_MIN_TEXT_CHARS, _CHARS_PER_TOKEN * self.max_model_len)


@dataclass(frozen=True, slots=True)
class _Checked:
    """A body whose fields are checked, one at a time."""

    endpoint: Endpoint
    body: JsonObject
    limits: RequestLimits


def check_limits(endpoint: Endpoint, body: JsonObject, limits: RequestLimits) -> None:
    """Raise the `RequestError` of the first field that goes beyond what is allowed."""
    _check_kinds(_CHECKS, _Checked(endpoint, body, limits))


def check_pooling_limits(endpoint: Endpoint, body: JsonObject, limits: RequestLimits) -> None:
    """Raise the `RequestError` of the first field that a pooling request may not have so."""
    checked = _Checked(endpoint, body, limits)
    for name in prompt_fields(endpoint):
        _check_prompts(name, body.get(name), checked)
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        value, most = body.get(name), limits.max_model_len - 1
        if isinstance(value, int) and not 0 <= value <= most:
            raise _invalid(name, f"be 0 to {most}, 0 for no limit", value)
    _check_kinds(_POOLING_CHECKS, checked)


def _check_kinds(checks: Mapping[FieldKind, _Check], checked: _Checked) -> None:
    for kind, check in checks.items():
        for name in fields_of_kind(checked.endpoint, kind):
            if (value := checked.body.get(name)) is not None:
                check(name, value, checked)


def _check_answers(name: str, value: Any, checked: _Checked) -> None:
    most = checked.limits.max_n
    if isinstance(value, int) and not 1 <= value <= most:
        raise _invalid(name, f"be 1 to {most} on this server", value)


def _check_extra_args(field: str, given: Any, checked: _Checked) -> None:
    """Raise `UnsupportedFieldError` for a key without effect, or one that the server sets."""
    allowed = checked.limits.extra_args
    for name, value in given.items() if isinstance(given, dict) else ():
        if name in _RESERVED_ARGS or (allowed is not None and name not in allowed):
            known = f"any key but {', '.join(sorted(_RESERVED_ARGS))}"
            if allowed is not None:
                known = ", ".join(sorted(allowed)) or "no keys"
            raise UnsupportedFieldError(
                f"'{field}' may have {known} on this server, got {describe(name)}.", param=field
            )
        if name == REPORT_MODE and value not in _REPORT_MODES:
            modes = ", ".join(_REPORT_MODES)
            raise _invalid(f"{field}.{name}", f"be one of {modes}", describe(value))


def _check_beams(name: str, value: Any, checked: _Checked) -> None:
    """Raise `UnsupportedFieldError` for fields that vLLM's beam search ignores or fails on."""
    if value is not True:
        return
    body = checked.body
    rows = fields_by_name(checked.endpoint).values()
    excluded = (
        (f"'{row.path}'", row.path)
        for row in rows
        if row.without_beams and body.get(row.path) not in (None, *row.idle)
    )
    what, param = next(excluded, ("", ""))
    if not what and body.get("echo") and body.get("logprobs") is not None:
        what, param = "'echo' with 'logprobs'", "echo"
    if not what and checked.endpoint is Endpoint.COMPLETION and body.get("stream"):
        what, param = "'stream'", "stream"
    if what:
        raise UnsupportedFieldError(
            f"{what} has no effect with '{name}': true; send one or the other.", param=param
        )


def _check_biases(name: str, value: Any, checked: _Checked) -> None:
    """Raise `InvalidValueError` beyond OpenAI's bounds, to which vLLM clips silently."""
    _check_number(name, value, checked.limits.max_logit_bias)
    for token, bias in value.items() if isinstance(value, dict) else ():
        if token.removeprefix("-").isdecimal():
            _check_token(name, int(token), checked.limits)
        if isinstance(bias, int | float) and abs(bias) > _MAX_BIAS:
            allowed = f"be -{_MAX_BIAS} to {_MAX_BIAS}"
            raise _invalid(name, allowed, f"{bias} for token {describe(token)}")


def _check_number(name: str, value: Any, limit: int) -> None:
    if isinstance(value, list | dict) and len(value) > limit:
        raise _invalid(name, f"have at most {limit} items on this server", len(value))


def _check_max_tokens(name: str, value: Any, checked: _Checked) -> None:
    most = checked.limits.max_model_len
    if isinstance(value, int) and value > most:
        raise ContextLengthError(
            f"'{name}' is {value}, but this model's maximum context length is {most} tokens, "
            "prompt included.",
            param=name,
        )


def bound_tokens(endpoint: Endpoint, body: JsonObject, limits: RequestLimits) -> None:
    """Lower the limits of answer tokens to the model's context."""
    for name in fields_of_kind(endpoint, FieldKind.MAX_TOKENS):
        if isinstance(value := body.get(name), int):
            body[name] = min(value, limits.max_model_len)


def _check_tools(field: str, tools: Any, _: _Checked) -> None:
    """Raise `InvalidSchemaError` for a tool whose arguments are not an object."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        within = isinstance(tool, dict) and isinstance(tool.get("function"), dict)
        holder, path = (tool["function"], ".function") if within else (tool, "")
        for name in _ARGUMENTS:
            schema = holder.get(name) if isinstance(holder, dict) else None
            kind = schema.get("type", "object") if isinstance(schema, dict) else "object"
            if kind != "object" and not (isinstance(kind, list) and "object" in kind):
                param = f"{field}[{index}]{path}.{name}"
                raise InvalidSchemaError(
                    f"The arguments of a tool are an object; the type in '{param}' is "
                    f"{describe(kind)}.",
                    param=param,
                )


def _check_messages(field: str, messages: Any, _: _Checked) -> None:
    if not isinstance(messages, list):
        return
    if not messages:
        raise _invalid(field, "have at least 1 item", 0)
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        # An assistant's turn may consist of tool calls alone.
        needed = ("role",) if message.get("role") == "assistant" else ("role", "content")
        for name in needed:
            if message.get(name) is None:
                path = f"{field}[{index}].{name}"
                raise MissingFieldError(f"The field '{path}' is missing.", param=path)


def _check_prompt(name: str, value: Any, checked: _Checked) -> None:
    """Check the prompts of a model that generates text."""
    if checked.endpoint.pools:
        return
    if value in ([""], [[]]):
        raise _empty(name)
    # vLLM would notice only after it has queued some of them.
    most = checked.limits.max_queued_tokens
    lists = value if isinstance(value, list) else ()
    num_tokens = sum(len(ids) for ids in lists if isinstance(ids, list))
    if most is not None and num_tokens > most:
        raise OverloadedError(
            f"The prompts have {num_tokens} tokens; at most {most} may wait for their prefill "
            "(--max-queued-tokens).",
            rejection="queued_tokens",
            param=name,
        )
    _check_prompts(name, value, checked)


def _check_prompts(name: str, value: Any, checked: _Checked) -> None:
    if value in ("", []):
        raise _empty(name)
    if not isinstance(value, list) or is_message(value[0]):
        return
    if isinstance(value[0], int):
        _check_tokens(name, value, checked)
        return
    for index, item in enumerate(value):
        place = f"{name}[{index}]"
        if item in ("", []):
            raise _empty(place)
        _check_tokens(place, item, checked)


def _empty(path: str) -> InvalidValueError:
    return InvalidValueError(f"'{path}' must not be empty.", param=path)


def _check_tokens(name: str, tokens: Any, checked: _Checked) -> None:
    """Raise `InvalidValueError` for the first item that is no token id."""
    for index, token in enumerate(tokens if isinstance(tokens, list) else ()):
        if isinstance(token, int):
            _check_token(f"{name}[{index}]", token, checked.limits)


def _check_token(path: str, token: int, limits: RequestLimits) -> None:
    if not 0 <= token < limits.vocab_size:
        raise _invalid(path, f"be a token id of 0 to {limits.vocab_size - 1}", token)
    if token in limits.missing_ids:
        raise _invalid(path, "be an id that the tokenizer has a token for", token)


def _check_truncation(name: str, kept: Any, checked: _Checked) -> None:
    most = checked.limits.max_model_len
    if isinstance(kept, int) and (kept == 0 or not -1 <= kept <= most):
        raise _invalid(name, f"be 1 to {most}, or -1 for as many as fit", describe(kept))


def _check_dimensions(name: str, value: Any, checked: _Checked) -> None:
    allowed = checked.limits.dimensions
    if not isinstance(value, int):
        return
    if not allowed:
        raise UnsupportedFieldError(
            f"'{name}' is {value}, but this model was not trained for embeddings that can be cut "
            "shorter; remove it.",
            param=name,
        )
    if value not in allowed:
        known = f"one of {', '.join(map(str, allowed))}"
        if isinstance(allowed, range):
            known = f"{allowed[0]} to {allowed[-1]}"
        raise _invalid(name, f"be {known} for this model", value)


def _check_encoding(name: str, value: Any, _: _Checked) -> None:
    if isinstance(value, str) and value not in _ENCODINGS:
        raise _invalid(name, "be 'float' or 'base64' on this server", describe(value))


def _invalid(path: str, allowed: str, given: object) -> InvalidValueError:
    return InvalidValueError(f"'{path}' must {allowed}, got {given}.", param=path)


def refuse_media(endpoint: Endpoint, body: JsonObject) -> None:
    """Raise `UnsupportedFieldError` for the first media option or part of a prompt.

    vLLM's front end fetches the media of a conversation before it checks that the model accepts
    them.
    """
    prompts = [(name, body[name]) for name in prompt_fields(endpoint) if name in body]
    options = ("images", *fields_of_kind(endpoint, FieldKind.MEDIA))
    given = (name for name in options if body.get(name))
    found = next(given, None) or next(_media(prompts), None)
    if found is not None:
        raise UnsupportedFieldError(
            f"'{found}' is not supported: the served model takes text alone.", param=found
        )


def _media(places: list[tuple[str, object]]) -> Iterator[str]:
    for path, value in places:
        if isinstance(value, list):
            yield from _media([(f"{path}[{index}]", item) for index, item in enumerate(value)])
        elif isinstance(value, dict):
            kind = value.get("type")
            if (isinstance(kind, str) and kind in _MEDIA) or not _MEDIA.isdisjoint(value):
                yield path
            yield from _media([(f"{path}.content", value.get("content"))])


_Check = Callable[[str, Any, _Checked], None]
_CHECKS: Mapping[FieldKind, _Check] = {
    FieldKind.ANSWERS: _check_answers,
    FieldKind.PRIORITY: lambda name, value, checked: check_priority(
        value, name, has_priorities=checked.limits.has_priorities
    ),
    FieldKind.EXTRA_ARGS: _check_extra_args,
    FieldKind.TRANSFER: lambda name, value, checked: check_kv_transfer(
        name, value, checked.body, is_on=checked.limits.transfers_kv
    ),
    FieldKind.BEAM_SEARCH: _check_beams,
    FieldKind.STOP: lambda name, value, checked: _check_number(
        name, value, checked.limits.max_stop
    ),
    FieldKind.BIASES: _check_biases,
    FieldKind.IDS: _check_tokens,
    FieldKind.MAX_TOKENS: _check_max_tokens,
    FieldKind.TOOLS: _check_tools,
    FieldKind.MESSAGES: _check_messages,
    FieldKind.PROMPTS: _check_prompt,
    FieldKind.TOKENS: _check_tokens,
    FieldKind.TRUNCATION: _check_truncation,
}
"""Checks of values by kind of field, in their order."""
_POOLING_CHECKS: Mapping[FieldKind, _Check] = {
    FieldKind.DIMENSIONS: _check_dimensions,
    FieldKind.ENCODING: _check_encoding,
}
