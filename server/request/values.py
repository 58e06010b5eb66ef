"""Limits of values, checked before vLLM's models and the engine get them.

vLLM lacks these checks, makes them deep inside the engine, names another field, or omits the limit
from its message. Pure functions over the body; wrong types are left to the request models.
"""

from __future__ import annotations

import math
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
    invalid_value,
)
from server.request.endpoints import is_message
from server.request.options import check_priority
from server.request.sizes import RequestLimits
from server.request.tables import (
    LOGPROBS_FIELDS,
    MAX_TOKENS_FIELDS,
    FieldKind,
    fields_by_name,
    fields_of_kind,
    prompt_fields,
)
from server.wire import Endpoint, JsonObject

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
    "image image_url input_image image_pil image_embeds images audio_url input_audio audio_embeds "
    "video_url video_embeds".split()
)
"""Types of content parts, and the fields that hold them if `type` is omitted."""
_GREEDY_BELOW = 1e-5
"""Temperatures that vLLM samples greedily."""
_REPETITION = "repetition_detection"


@dataclass(frozen=True, slots=True)
class _Request:
    """A body whose fields are checked, one at a time."""

    endpoint: Endpoint
    body: JsonObject
    limits: RequestLimits


def check_values(
    endpoint: Endpoint, body: JsonObject, limits: RequestLimits, defaults: Mapping[str, Any]
) -> None:
    """Raise the `RequestError` of the first field that goes beyond what is allowed.

    `defaults` are the model's sampling parameters.
    """
    request = _Request(endpoint, body, limits)
    for kind, check in _CHECKS.items():
        for name in fields_of_kind(endpoint, kind):
            if (value := body.get(name)) is not None:
                check(name, value, request)
    for name, accepted in _RANGES.items():
        value = body.get(name)
        if (type(value) is int or isinstance(value, float)) and value not in accepted:
            raise invalid_value(name, f"be {accepted}", value)
    _check_sampling(endpoint, body, limits, defaults)
    if limits.text_only:
        # vLLM's front end fetches the media of a conversation before it checks that the model
        # accepts them.
        options = ("images", *fields_of_kind(endpoint, FieldKind.MEDIA))
        prompts = [(name, body[name]) for name in prompt_fields(endpoint) if name in body]
        path = next((name for name in options if body.get(name)), None) or next(
            _media(prompts), None
        )
        if path is not None:
            raise UnsupportedFieldError(
                f"'{path}' is not supported: the served model takes text alone.", param=path
            )
    if endpoint.pools:
        for name in prompt_fields(endpoint):
            _check_prompts(name, body.get(name), request)
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            value, most = body.get(name), limits.max_model_len - 1
            if isinstance(value, int) and not 0 <= value <= most:
                raise invalid_value(name, f"be 0 to {most}, 0 for no limit", value)
        for name in fields_of_kind(endpoint, FieldKind.DIMENSIONS):
            _check_dimensions(name, body.get(name), limits.dimensions)
        for name in fields_of_kind(endpoint, FieldKind.ENCODING):
            if isinstance(value := body.get(name), str) and value not in _ENCODINGS:
                raise invalid_value(name, "be 'float' or 'base64' on this server", value)


def _check_answers(name: str, value: Any, request: _Request) -> None:
    most = request.limits.max_n
    if isinstance(value, int) and not 1 <= value <= most:
        raise invalid_value(name, f"be 1 to {most} on this server", value)


def _check_extra_args(field: str, arguments: Any, request: _Request) -> None:
    """Raise `UnsupportedFieldError` for a key without effect, or one that the server sets."""
    allowed = request.limits.extra_args
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        if name in _RESERVED_ARGS or (allowed is not None and name not in allowed):
            known = f"any key but {', '.join(sorted(_RESERVED_ARGS))}"
            if allowed is not None:
                known = ", ".join(sorted(allowed)) or "no keys"
            raise UnsupportedFieldError(
                f"'{field}' may have {known} on this server, got {describe(name)}.", param=field
            )
        if name == REPORT_MODE and value not in _REPORT_MODES:
            raise invalid_value(f"{field}.{name}", f"be one of {', '.join(_REPORT_MODES)}", value)


def _check_beams(name: str, value: Any, request: _Request) -> None:
    """Raise `UnsupportedFieldError` for fields that vLLM's beam search ignores or fails on."""
    if value is not True:
        return
    body = request.body
    excluded = (
        (f"'{row.path}'", row.path)
        for row in fields_by_name(request.endpoint).values()
        if row.without_beams and body.get(row.path) not in (None, *row.idle)
    )
    what, param = next(excluded, ("", ""))
    if not what and body.get("echo") and body.get("logprobs") is not None:
        what, param = "'echo' with 'logprobs'", "echo"
    if not what and request.endpoint is Endpoint.COMPLETION and body.get("stream"):
        what, param = "'stream'", "stream"
    if what:
        raise UnsupportedFieldError(
            f"{what} has no effect with '{name}': true; send one or the other.", param=param
        )


def _check_biases(name: str, value: Any, request: _Request) -> None:
    """Raise `InvalidValueError` beyond OpenAI's bounds, to which vLLM clips silently."""
    _check_number(name, value, request.limits.max_logit_bias)
    for token, bias in value.items() if isinstance(value, dict) else ():
        if token.removeprefix("-").isdecimal():
            _check_token(name, int(token), request.limits)
        if isinstance(bias, int | float) and abs(bias) > _MAX_BIAS:
            raise InvalidValueError(
                f"'{name}' must be -{_MAX_BIAS} to {_MAX_BIAS}, got {bias} for token "
                f"{describe(token)}.",
                param=name,
            )


def _check_number(name: str, value: Any, limit: int) -> None:
    if isinstance(value, list | dict) and len(value) > limit:
        raise invalid_value(name, f"have at most {limit} items on this server", len(value))


def _check_context(name: str, value: Any, request: _Request) -> None:
    most = request.limits.max_model_len
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


def _check_tools(field: str, tools: Any, _: _Request) -> None:
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


def _check_messages(field: str, messages: Any, _: _Request) -> None:
    if not isinstance(messages, list):
        return
    if not messages:
        raise invalid_value(field, "have at least 1 item", 0)
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        # An assistant's turn may consist of tool calls alone.
        needed = ("role",) if message.get("role") == "assistant" else ("role", "content")
        for name in needed:
            if message.get(name) is None:
                path = f"{field}[{index}].{name}"
                raise MissingFieldError(f"The field '{path}' is missing.", param=path)


def _check_prompt(name: str, value: Any, request: _Request) -> None:
    """Check the prompts of a model that generates text."""
    if request.endpoint.pools:
        return
    if value in ([""], [[]]):
        raise _empty(name)
    # vLLM would notice only after it has queued some of them.
    most = request.limits.max_queued_tokens
    lists = value if isinstance(value, list) else ()
    num_tokens = sum(len(ids) for ids in lists if isinstance(ids, list))
    if most is not None and num_tokens > most:
        raise OverloadedError(
            f"The prompts have {num_tokens} tokens; at most {most} may wait for their prefill "
            "(--max-queued-tokens).",
            rejection="queued_tokens",
            param=name,
        )
    _check_prompts(name, value, request)


def _check_prompts(name: str, value: Any, request: _Request) -> None:
    if value in ("", []):
        raise _empty(name)
    if not isinstance(value, list) or is_message(value[0]):
        return
    if isinstance(value[0], int):
        _check_tokens(name, value, request)
        return
    for index, item in enumerate(value):
        if item in ("", []):
            raise _empty(f"{name}[{index}]")
        _check_tokens(f"{name}[{index}]", item, request)


def _check_tokens(name: str, tokens: Any, request: _Request) -> None:
    """Raise `InvalidValueError` for the first item that is no token id."""
    for index, token in enumerate(tokens if isinstance(tokens, list) else ()):
        if isinstance(token, int):
            _check_token(f"{name}[{index}]", token, request.limits)


def _check_token(path: str, token: int, limits: RequestLimits) -> None:
    if not 0 <= token < limits.vocab_size:
        raise invalid_value(path, f"be a token id of 0 to {limits.vocab_size - 1}", token)
    if token in limits.missing_ids:
        raise invalid_value(path, "be an id that the tokenizer has a token for", token)


def _check_truncation(name: str, value: Any, request: _Request) -> None:
    most = request.limits.max_model_len
    if isinstance(value, int) and (value == 0 or not -1 <= value <= most):
        raise invalid_value(name, f"be 1 to {most}, or -1 for as many as fit", value)


def _check_dimensions(name: str, value: Any, allowed: range | tuple[int, ...]) -> None:
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
        raise invalid_value(name, f"be {known} for this model", value)


def _media(values: list[tuple[str, object]]) -> Iterator[str]:
    for path, value in values:
        if isinstance(value, list):
            yield from _media([(f"{path}[{index}]", item) for index, item in enumerate(value)])
        elif isinstance(value, dict):
            kind = value.get("type")
            if (isinstance(kind, str) and kind in _MEDIA) or not _MEDIA.isdisjoint(value):
                yield path
            yield from _media([(f"{path}.content", value.get("content"))])


# Sampling parameters.


@dataclass(frozen=True, slots=True)
class _Range:
    """Accepted numbers: `low` to `high`; `low` itself only if `closed`."""

    low: float
    high: float = math.inf
    closed: bool = True

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.closed else value > self.low
        return above and value <= self.high and math.isfinite(value)

    def __str__(self) -> str:
        if not math.isinf(self.high):
            return f"between {self.low} and {self.high}"
        return f"at least {self.low:g}" if self.closed else f"a finite number above {self.low:g}"


_INT64_MAX = 2**63 - 1
"""Largest integer that reaches the engine's process on every path."""

_RANGES: Mapping[str, _Range] = {
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "repetition_penalty": _Range(0, closed=False),
    "min_p": _Range(0, 1),
    "min_tokens": _Range(0),
    # -1 and 0 switch it off.
    "top_k": _Range(-1, _INT64_MAX),
    "stream_interval": _Range(1, _INT64_MAX),
    # An exponent of the answer's length: floats hold its power for every context.
    "length_penalty": _Range(-32, 32),
}
"""vLLM's ranges in `SamplingParams._verify_args`, and bounds that it has not."""


def _check_sampling(
    endpoint: Endpoint, fields: JsonObject, limits: RequestLimits, defaults: Mapping[str, Any]
) -> None:
    # Limits of answer tokens; 0 is for an `echo` without an answer.
    lowest = 0 if fields.get("echo") else 1
    most_tokens = {
        name: fields[name] for name in MAX_TOKENS_FIELDS if type(fields.get(name)) is int
    }
    for name, value in most_tokens.items():
        if value < lowest:
            raise invalid_value(name, f"be at least {lowest}", value)
    fewest = fields.get("min_tokens")
    # The first of these decides, if there are two.
    first = next((name for name in reversed(MAX_TOKENS_FIELDS) if most_tokens.get(name)), None)
    if first is not None and type(fewest) is int and fewest > most_tokens[first]:
        raise invalid_value("min_tokens", f"be at most '{first}', {most_tokens[first]}", fewest)
    # All answers of a greedy request would be the same.
    number, temperature = fields.get("n"), fields.get("temperature")
    if temperature is None:
        temperature = defaults.get("temperature")
    is_greedy = isinstance(temperature, int | float) and 0 <= temperature < _GREEDY_BELOW
    if is_greedy and type(number) is int and number > 1 and not fields.get("use_beam_search"):
        raise invalid_value("n", f"be 1 at a 'temperature' of {temperature}", number)
    size = limits.vocab_size
    most = size if limits.max_logprobs == -1 else min(size, limits.max_logprobs)
    # -1 means the whole vocabulary.
    lowest = -1 if most == size else 0
    for name in LOGPROBS_FIELDS:
        value = fields.get(name)
        if type(value) is int and not lowest <= value <= most:
            raise invalid_value(
                name, f"be {lowest} to {most} on this server (--max-logprobs)", value
            )
    for name in (*fields_of_kind(endpoint, FieldKind.STOP), "bad_words"):
        words = fields.get(name)
        if words == "":
            raise _empty(name)
        for index, word in enumerate(words if isinstance(words, list) else ()):
            if word == "":
                raise _empty(f"{name}[{index}]")
    if fields.get("allowed_token_ids") == [] and not fields.get("use_beam_search"):
        raise _empty("allowed_token_ids")
    if isinstance(repetition := fields.get(_REPETITION), dict):
        _check_repetition(repetition)


def _check_repetition(value: JsonObject) -> None:
    sizes = [value.get(name, 0) for name in ("max_pattern_size", "min_pattern_size", "min_count")]
    if not all(type(size) is int for size in sizes):
        return
    largest, smallest, count = sizes
    if largest < 0:
        raise invalid_value(f"{_REPETITION}.max_pattern_size", "be at least 0", largest)
    if not 0 <= smallest <= largest:
        allowed = f"be 0 to 'max_pattern_size', {largest}"
        raise invalid_value(f"{_REPETITION}.min_pattern_size", allowed, smallest)
    if largest > 0 and count < 2:
        raise invalid_value(f"{_REPETITION}.min_count", "be at least 2", count)


# `kv_transfer_params`, which a router copies from one server's answer to another.


def _check_transfer(field: str, parameters: Any, request: _Request) -> None:
    """Raise the `RequestError` of the first key of `given` that the engine could fail on.

    vLLM's connector uses the values as they are: a wrong type would end the engine.
    """
    if not parameters:
        return
    if not request.limits.transfers_kv:
        raise UnsupportedFieldError(
            f"'{field}' is not supported: this server runs without NixlConnector "
            "(--kv-transfer-config).",
            param=field,
        )
    if not isinstance(parameters, dict):
        raise invalid_value(field, "be an object", parameters)
    if (request.body.get("n") or 1) != 1 or request.body.get("use_beam_search"):
        raise invalid_value(field, "come with n=1 and without beam search", parameters)
    for name, value in parameters.items():
        if name not in _TRANSFER_KEYS:
            raise invalid_value(f"{field}.{name}", f"be one of {', '.join(_TRANSFER_KEYS)}", name)
        is_valid, must = _TRANSFER_KEYS[name]
        if value is not None and not is_valid(value):
            raise invalid_value(f"{field}.{name}", f"be {must}", value)


def _in(values: range) -> Callable[[object], bool]:
    return lambda value: type(value) is int and value in values


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 256 and value.isprintable()


def _are_blocks(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(group, list) and all(map(_SIZE[0], group)) for group in value
    )


_SIZE = (_in(range(1 << 31)), "a whole number")
_COUNT = (_in(range(1, 1025)), "1 to 1024")
_NAME = (_is_name, "a text of at most 256 characters")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
_TRANSFER_KEYS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "do_remote_prefill": _FLAG,
    "do_remote_decode": _FLAG,
    "remote_engine_id": _NAME,
    "remote_request_id": _NAME,
    "remote_block_ids": (_are_blocks, "lists of block numbers"),
    "remote_host": _NAME,
    "remote_port": (_in(range(1, 1 << 16)), "1 to 65535"),
    "remote_num_tokens": _SIZE,
    "remote_blocks_expiry_time": (
        lambda value: type(value) is int or isinstance(value, float),
        "a number",
    ),
    "transfer_mode": (lambda value: value == "pull", "'pull'"),
    "tp_size": _COUNT,
    "pp_size": _COUNT,
    "dcp_size": _COUNT,
    "rbln_prompt_digest": _NAME,
}


def _empty(path: str) -> InvalidValueError:
    return InvalidValueError(f"'{path}' must not be empty.", param=path)


_CHECKS: Mapping[FieldKind, Callable[[str, Any, _Request], None]] = {
    FieldKind.ANSWERS: _check_answers,
    FieldKind.PRIORITY: lambda name, value, request: check_priority(
        value, name, has_priorities=request.limits.has_priorities
    ),
    FieldKind.EXTRA_ARGS: _check_extra_args,
    FieldKind.TRANSFER: _check_transfer,
    FieldKind.BEAM_SEARCH: _check_beams,
    FieldKind.STOP: lambda name, value, request: _check_number(
        name, value, request.limits.max_stop
    ),
    FieldKind.BIASES: _check_biases,
    FieldKind.IDS: _check_tokens,
    FieldKind.MAX_TOKENS: _check_context,
    FieldKind.TOOLS: _check_tools,
    FieldKind.MESSAGES: _check_messages,
    FieldKind.PROMPTS: _check_prompt,
    FieldKind.TOKENS: _check_tokens,
    FieldKind.TRUNCATION: _check_truncation,
}
"""Checks of values by kind of field, in their order."""
