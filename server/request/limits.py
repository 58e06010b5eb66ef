"""Limits of generation requests, checked before the engine gets them.

vLLM lacks these checks, makes them deep inside the engine, or omits the limit from its message.
Pure functions over the body; wrong types are left to the request models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers

from rbln_backend.api.requests import BACKGROUND_PRIORITY
from server.errors import (
    ContextLengthError,
    InvalidSchemaError,
    InvalidValueError,
    MissingFieldError,
    OverloadedError,
    UnsupportedFieldError,
    describe,
)
from server.request.options.tier import Tier
from server.wire.endpoint import JsonObject

PRIORITY_HEADER = "X-Vllm-Priority"
RANK_HEADER = "X-data-parallel-rank"
_RANK = re.compile("[0-9]{1,6}")
_PRIORITY = re.compile("[+-]?[0-9]{1,12}")
_MAX_PRIORITY = BACKGROUND_PRIORITY - 1
"""Higher values are those of the service tiers `flex` and `priority`."""
_MAX_BIAS = 100
_ARGUMENTS = ("parameters", "input_schema")
"""Fields of a tool with the schema of its arguments: OpenAI's, Anthropic's."""
_STOP_FIELDS = ("stop", "stop_sequences")
_EXTRA_ARGS = "vllm_xargs"
_RESERVED_ARGS = frozenset(("kv_transfer_params", "ec_transfer_params", "speculation"))
"""Keys that vLLM and this server set, or reject as fields."""
REPORT_MODE = "kv_cache_report_mode"
"""The key that selects the KV events of a request."""
_REPORT_MODES = ("incremental", "full")
_NOT_OF_BEAMS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("stop", "stop_token_ids", "bad_words", "allowed_token_ids"), ([], "")),
    **dict.fromkeys(("min_tokens", "min_p", "presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("top_p", "repetition_penalty"), (1,)),
    "top_k": (0, -1),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    **dict.fromkeys(("seed", "prompt_logprobs", "structured_outputs"), ()),
}
"""Fields that beam search ignores, with the values that mean no change."""
MAX_TOKENS_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of one server for generation requests; lengths are in tokens."""

    max_n: int
    max_prompts: int
    max_stop: int
    max_logit_bias: int
    max_model_len: int
    vocab_size: int
    max_queued_tokens: int | None
    has_priorities: bool
    extra_args: frozenset[str] | None = frozenset()
    """Accepted keys of `vllm_xargs`; None accepts any but those of `_RESERVED_ARGS`."""


def check_limits(body: JsonObject, limits: RequestLimits) -> None:
    """Raise the `RequestError` of the first field that goes beyond what is allowed."""
    n = body.get("n")
    if isinstance(n, int) and not 1 <= n <= limits.max_n:
        raise InvalidValueError(
            f"'n' must be 1 to {limits.max_n} on this server, got {n}.", param="n"
        )
    check_priority(body.get("priority"), "priority", limits)
    _check_extra_args(body.get(_EXTRA_ARGS), limits)
    _check_beams(body)
    for name in _STOP_FIELDS:
        _check_number(body.get(name), name, limits.max_stop)
    _check_number(body.get("logit_bias"), "logit_bias", limits.max_logit_bias)
    _check_biases(body.get("logit_bias"))
    for name in MAX_TOKENS_FIELDS:
        value = body.get(name)
        if isinstance(value, int) and value > limits.max_model_len:
            raise ContextLengthError(
                f"'{name}' is {value}, but this model's maximum context length is "
                f"{limits.max_model_len} tokens, prompt included.",
                param=name,
            )
    _check_tools(body.get("tools"))
    _check_messages(body.get("messages"))
    _check_prompt(body, limits)
    check_token_ids(body.get("tokens"), limits.vocab_size, "tokens")
    _check_truncation(body, limits.max_model_len)


def _check_truncation(body: JsonObject, max_model_len: int) -> None:
    """Raise `InvalidValueError` for a truncation to no token, or to more than the context."""
    kept = body.get("truncate_prompt_tokens")
    if isinstance(kept, int) and (kept == 0 or not -1 <= kept <= max_model_len):
        raise InvalidValueError(
            f"'truncate_prompt_tokens' must be 1 to {max_model_len}, or -1 for as many as "
            f"fit, got {describe(kept)}.",
            param="truncate_prompt_tokens",
        )


def bound_tokens(body: JsonObject, limits: RequestLimits) -> None:
    """Lower the limits of answer tokens to the model's context."""
    for name in MAX_TOKENS_FIELDS:
        if isinstance(value := body.get(name), int):
            body[name] = min(value, limits.max_model_len)


def _check_biases(biases: object) -> None:
    """Raise `InvalidValueError` beyond OpenAI's bounds, to which vLLM clips silently."""
    for token, bias in biases.items() if isinstance(biases, dict) else ():
        if isinstance(bias, int | float) and abs(bias) > _MAX_BIAS:
            raise InvalidValueError(
                f"'logit_bias' must be -{_MAX_BIAS} to {_MAX_BIAS}, got {bias} for token "
                f"{describe(token)}.",
                param="logit_bias",
            )


def check_priority_header(headers: Headers, limits: RequestLimits) -> None:
    """Raise the `RequestError` of an invalid priority header, which vLLM would accept or ignore."""
    given = headers.get(PRIORITY_HEADER)
    if given is None:
        return
    if not _PRIORITY.fullmatch(given):
        raise InvalidValueError(
            f"The header {PRIORITY_HEADER} must be an integer of at most 12 digits, got "
            f"{describe(given)}.",
            param=PRIORITY_HEADER,
        )
    check_priority(int(given), PRIORITY_HEADER, limits)


def check_tier(fields: JsonObject, headers: Headers, tier: Tier | None) -> None:
    """Raise `UnsupportedFieldError` for a priority in a tier that sets the priority."""
    if tier is None or tier.engine_priority is None:
        return
    for name, value in (
        ("priority", fields.get("priority")),
        (PRIORITY_HEADER, headers.get(PRIORITY_HEADER)),
    ):
        if value not in (None, 0, "0"):
            raise UnsupportedFieldError(
                f"'{name}' has no effect in the service tier {tier.value!r}.", param=name
            )


def check_rank_header(headers: Headers, num_ranks: int) -> None:
    """Raise `InvalidValueError` for a header that is not a data-parallel rank."""
    given = headers.get(RANK_HEADER)
    if given is None:
        return
    if not _RANK.fullmatch(given) or int(given) >= num_ranks:
        raise InvalidValueError(
            f"The header {RANK_HEADER} must be a data-parallel rank of this server, 0 to "
            f"{num_ranks - 1}, got {describe(given)}.",
            param=RANK_HEADER,
        )


def check_priority(value: object, name: str, limits: RequestLimits) -> None:
    """Raise the `RequestError` of a priority that has no effect, or is not a small integer."""
    if not isinstance(value, int) or not value:
        return
    if not limits.has_priorities:
        raise UnsupportedFieldError(
            f"'{name}' has no effect: this server was not started with "
            "--scheduling-policy priority.",
            param=name,
        )
    if abs(value) > _MAX_PRIORITY:
        raise InvalidValueError(
            f"'{name}' must be -{_MAX_PRIORITY} to {_MAX_PRIORITY}, got {describe(value)}.",
            param=name,
        )


def _check_extra_args(given: object, limits: RequestLimits) -> None:
    """Raise `UnsupportedFieldError` for a key without effect, or one that the server sets."""
    allowed = limits.extra_args
    if not isinstance(given, dict):
        return
    for name, value in given.items():
        if name in _RESERVED_ARGS or (allowed is not None and name not in allowed):
            raise UnsupportedFieldError(
                f"'{_EXTRA_ARGS}' may have {_words(allowed)} on this server, got {describe(name)}.",
                param=_EXTRA_ARGS,
            )
        if name == REPORT_MODE and value not in _REPORT_MODES:
            raise InvalidValueError(
                f"'{_EXTRA_ARGS}.{name}' must be one of {', '.join(_REPORT_MODES)}, got "
                f"{describe(value)}.",
                param=f"{_EXTRA_ARGS}.{name}",
            )


def _words(allowed: frozenset[str] | None) -> str:
    if allowed is None:
        return f"any key but {', '.join(sorted(_RESERVED_ARGS))}"
    return ", ".join(sorted(allowed)) or "no keys"


def _check_beams(body: JsonObject) -> None:
    """Raise `UnsupportedFieldError` for fields that vLLM's beam search ignores or fails on."""
    if body.get("use_beam_search") is not True:
        return
    for name, idle in _NOT_OF_BEAMS.items():
        value = body.get(name)
        if value is not None and value not in idle:
            raise _without_beams(f"'{name}'", name)
    if body.get("echo") and body.get("logprobs") is not None:
        raise _without_beams("'echo' with 'logprobs'", "echo")


def _without_beams(what: str, param: str) -> UnsupportedFieldError:
    return UnsupportedFieldError(
        f"{what} has no effect with 'use_beam_search': true; send one or the other.", param=param
    )


def _check_number(value: object, name: str, limit: int) -> None:
    if isinstance(value, list | dict) and len(value) > limit:
        raise InvalidValueError(
            f"'{name}' must have at most {limit} items on this server, got {len(value)}.",
            param=name,
        )


def _check_tools(tools: object) -> None:
    """Raise `InvalidSchemaError` for a tool whose arguments are not an object."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        within = isinstance(tool, dict) and isinstance(tool.get("function"), dict)
        holder, path = (tool["function"], ".function") if within else (tool, "")
        for name in _ARGUMENTS:
            schema = holder.get(name) if isinstance(holder, dict) else None
            kind = schema.get("type", "object") if isinstance(schema, dict) else "object"
            if kind != "object" and not (isinstance(kind, list) and "object" in kind):
                param = f"tools[{index}]{path}.{name}"
                raise InvalidSchemaError(
                    f"The arguments of a tool are an object; the type in '{param}' is "
                    f"{describe(kind)}.",
                    param=param,
                )


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list):
        return
    if not messages:
        raise InvalidValueError("'messages' must have at least 1 item, got 0.", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        # An assistant's turn may consist of tool calls alone.
        needed = ("role",) if message.get("role") == "assistant" else ("role", "content")
        for name in needed:
            if message.get(name) is None:
                path = f"messages[{index}].{name}"
                raise MissingFieldError(f"The field '{path}' is missing.", param=path)


def _check_prompt(body: JsonObject, limits: RequestLimits) -> None:
    if "prompt" not in body:
        return
    prompt = body["prompt"]
    if prompt in ("", [], [""], [[]]) and body.get("prompt_embeds") is None:
        raise InvalidValueError("'prompt' must not be empty.", param="prompt")
    if not isinstance(prompt, list) or not prompt:
        return
    if isinstance(prompt[0], int):
        # One prompt of token ids; its length is checked against the context.
        check_token_ids(prompt, limits.vocab_size, "prompt")
        return
    if len(prompt) > limits.max_prompts:
        raise InvalidValueError(
            f"'prompt' must have 1 to {limits.max_prompts} items, got {len(prompt)}.",
            param="prompt",
        )
    check_queued(sum(len(ids) for ids in prompt if isinstance(ids, list)), limits)
    for index, ids in enumerate(prompt):
        if ids in ("", []):
            raise InvalidValueError(
                f"'prompt[{index}]' must not be empty.", param=f"prompt[{index}]"
            )
        check_token_ids(ids, limits.vocab_size, f"prompt[{index}]")


def check_queued(num_tokens: int, limits: RequestLimits) -> None:
    """Raise `OverloadedError` for prompts of token ids that exceed the queue together.

    vLLM would notice only after it has queued some of them.
    """
    if limits.max_queued_tokens is not None and num_tokens > limits.max_queued_tokens:
        raise OverloadedError(
            f"The prompts have {num_tokens} tokens; at most {limits.max_queued_tokens} may wait "
            "for their prefill (--max-queued-tokens).",
            rejection="queued_tokens",
            param="prompt",
        )


def check_token_ids(tokens: object, vocab_size: int, name: str) -> None:
    """Raise `InvalidValueError` for the first item of the field `name` that is no token id."""
    if not isinstance(tokens, list):
        return
    for index, token in enumerate(tokens):
        if isinstance(token, int) and not 0 <= token < vocab_size:
            raise InvalidValueError(
                f"'{name}[{index}]' must be a token id of 0 to {vocab_size - 1}, got {token}.",
                param=f"{name}[{index}]",
            )
