"""Rules for each documented field of the four APIs: one table for each API.

The names are those of Anthropic's and OpenAI's own clients (their typed parameters, compared by
tests/server/request/test_field_rules.py); `server.request.fields` applies the tables, and
docs/http_api.md is generated from them. vLLM's further fields are the request models' own. What
depends on the served model is decided in `server.request.thinking`. Pure data.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from server.wire.endpoint import Endpoint, JsonObject


class FieldAction(enum.Enum):
    """Action of the server on a field."""

    OBEYED = "obeyed"
    """The request model has it."""
    GRANTED = "granted"
    """The server always does this; the field is removed."""
    IGNORED = "ignored"
    """The field is removed and named in a header of the answer, which is correct without it."""
    REFUSED = "refused"
    """An answer without it would be wrong."""


@dataclass(frozen=True, slots=True)
class FieldRule:
    """Rule for one field; `path` has `[]` for the items of an array.

    `same` are the values, besides null, that mean the default: they are accepted. `stays`: accepted
    values are left in the body for the request model. `when` limits the rule to objects with these
    entries, `only` to these values. `schema` is the schema of an obeyed field that the request
    model does not have. `code` is the error code that Anthropic's clients read.
    """

    path: str
    action: FieldAction
    why: str = ""
    same: tuple[object, ...] = ()
    stays: bool = False
    when: Mapping[str, object] = field(default_factory=dict)
    only: tuple[object, ...] = ()
    schema: Mapping[str, object] = field(default_factory=dict)
    code: str | None = None


def _obeyed(*paths: str, why: str = "") -> tuple[FieldRule, ...]:
    return tuple(FieldRule(path, FieldAction.OBEYED, why) for path in paths)


def _granted(*paths: str, why: str) -> tuple[FieldRule, ...]:
    return tuple(FieldRule(path, FieldAction.GRANTED, why) for path in paths)


def _ignored(*paths: str, why: str, same: tuple[object, ...] = ()) -> tuple[FieldRule, ...]:
    return tuple(FieldRule(path, FieldAction.IGNORED, why, same) for path in paths)


def _refused(
    *paths: str, why: str, same: tuple[object, ...] = (), stays: bool = False
) -> tuple[FieldRule, ...]:
    return tuple(FieldRule(path, FieldAction.REFUSED, why, same, stays) for path in paths)


_LABEL = "a name that clients give their requests"
_CACHE = "prefixes are reused without marks, for as long as there is room"
_CACHE_KEY = "prefixes are found by what they are"
_NO_STORE = "answers of this API are not kept"
_NO_ID = "the header X-Request-Id names a request"
_NO_MIROSTAT = "the sampler has temperature, top_p, top_k and min_p"
_NO_TOOLS_HERE = "this server runs no tools"
_NO_MODERATION = "nothing is moderated"
_OBFUSCATION = "streams are not padded"
_TRANSFER = "no KV cache is transferred"
_NO_BUDGET = "thinking is not counted apart from the answer; max_tokens bounds both"

_SPECULATIVE = FieldRule(
    "speculative",
    FieldAction.OBEYED,
    "`false`: no drafts are checked for this request; the answer is the same. `true` is ignored "
    "by a server without speculation",
    schema={"type": ["boolean", "null"]},
)
_PREDICTION = FieldRule(
    "prediction",
    FieldAction.OBEYED,
    "as drafts, of one answer; ignored by a server without speculation",
    schema={
        "type": ["object", "null"],
        "properties": {
            "type": {"const": "content"},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                            "required": ["type", "text"],
                        },
                    },
                ]
            },
        },
        "required": ["type", "content"],
        "additionalProperties": False,
    },
)

_TIER = FieldRule(
    "service_tier",
    FieldAction.OBEYED,
    "the class that it runs in: auto, default, flex or priority",
    schema={"enum": ["auto", "default", "flex", "priority", None]},
)
_ANTHROPIC_TIER = FieldRule(
    "service_tier",
    FieldAction.OBEYED,
    "the class that it runs in: auto or standard_only",
    schema={"enum": ["auto", "standard_only", None]},
)

_NO_CALLS = "it is of the past, send tool_calls instead"
_TURNS = (
    *_obeyed("messages[].reasoning_content", why="as `reasoning`"),
    *_ignored("messages[].annotations", why="they are not shown to the model", same=([],)),
    *_ignored(
        *("messages[].provider_specific_fields", "messages[].reasoning_details"),
        *("messages[].thinking_blocks", "messages[].parsed"),
        why="what gateways and clients add to answers; the model is not shown it",
    ),
    *_granted("messages[].tool_calls[].index", why="calls are in the order of the list"),
    *_granted("messages[].tool_calls[].function.parsed_arguments", why="it is `arguments`, parsed"),
    *_refused("messages[].function_call", why=_NO_CALLS),
    *_refused("messages[].audio", why="conversations are text"),
)
"""Fields of earlier answers that clients send again."""

_COMMON = (
    *_TURNS,
    *_ignored("user", "metadata", "safety_identifier", why=_LABEL),
    *_ignored("prompt_cache_key", why=_CACHE_KEY),
    _TIER,
    *_ignored("store", why=_NO_STORE, same=(False,)),
    *_ignored("request_id", why=_NO_ID),
    *_ignored("cache_prompt", why=_CACHE, same=(True,)),
    *_ignored("keep_alive", why="the model stays loaded"),
    *_ignored("mirostat", "mirostat_tau", "mirostat_eta", why=_NO_MIROSTAT, same=(0,)),
    *_refused("modalities", why="answers are text", same=(["text"],)),
    *_refused(*("kv_transfer_params", "ec_transfer_params"), why=_TRANSFER, same=({},), stays=True),
    *_refused(
        *("return_token_offsets", "return_assistant_tokens_mask", "routed_experts_prompt_start"),
        why="it has no effect on this server",
        same=(False, 0),
        stays=True,
    ),
)
"""Rules of every endpoint without a table of its own."""

_POOLED = (
    *_refused(
        "padding",
        why="prompts are not padded: the model would attend to what is added",
        same=("do_not_pad",),
        stays=True,
    ),
    *_COMMON,
)

_MESSAGES = (
    *_obeyed("model", "messages", "max_tokens", "system", "stop_sequences", "stream"),
    *_obeyed("temperature", "top_p", "top_k", "tools", "tool_choice", "output_config"),
    *_ignored("request_id", why=_NO_ID),
    *_obeyed("thinking", why="by the switch of the model's chat template, where it has one"),
    _SPECULATIVE,
    *_granted("cache_control", "system[].cache_control", "tools[].cache_control", why=_CACHE),
    *_granted("messages[].content[].cache_control", why=_CACHE),
    *_granted("messages[].content[].content[].cache_control", why=_CACHE),
    *_ignored("metadata", "user_profile_id", "workspace_id", why=_LABEL),
    *_ignored("billing_policy", why="nothing is billed"),
    _ANTHROPIC_TIER,
    *_ignored("speed", why="there is one", same=("standard",)),
    *_ignored("diagnostics", why="usage.cache_read_input_tokens says where the match ended"),
    *_ignored("fallbacks", "fallback_credit_token", why="no request is declined by policy"),
    *_ignored(
        "context_management",
        why="what it would take out of the prompt stays in; one that becomes too long is a 400",
        same=(
            {},
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
        ),
    ),
    *_ignored("output_config.task_budget", why="it is not passed to the model"),
    *_ignored("thinking.display", why="thinking is shown as it is", same=("summarized",)),
    *_ignored("thinking.budget_tokens", why=_NO_BUDGET),
    *_ignored("system[].citations", "messages[].content[].citations", why="none are made"),
    *_ignored("messages[].content[].caller", "messages[].content[].toolset_name", why=_LABEL),
    *_ignored("tools[].input_examples", why="the model is not shown them"),
    *_ignored(
        "tools[].eager_input_streaming", why="input streams as it is generated", same=(True,)
    ),
    *_refused("tools[].allowed_callers", why="the model calls tools directly", same=(["direct"],)),
    *_refused(
        "tools[].type",
        why="tools are those of the client, with an input_schema; " + _NO_TOOLS_HERE,
        same=("custom",),
    ),
    *_refused(
        "messages[].content[].type",
        why="text, image, thinking and the client's own tools are what a conversation consists of",
        same=(
            *("text", "image", "thinking", "redacted_thinking"),
            *("tool_use", "tool_result", "tool_reference"),
        ),
        stays=True,
    ),
    *_refused("mcp_servers", why=_NO_TOOLS_HERE, same=([],)),
    *_refused("container", why="this server runs no code", same=({},)),
    FieldRule(
        "thread",
        FieldAction.REFUSED,
        "threads are not supported; the client sends the whole conversation",
        # Anthropic's client then sends the whole conversation, as it did before threads.
        code="thread_unsupported_request",
    ),
    *_refused("compaction", why="this server summarizes no conversations"),
    *_refused("inference_geo", why="no region is known to this server", same=("global",)),
    *_refused(*("kv_transfer_params", "ec_transfer_params"), why=_TRANSFER, same=({},), stays=True),
)

_CHAT = (
    *_obeyed("model", "messages", "max_tokens", "max_completion_tokens", "n", "seed", "stop"),
    *_obeyed("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias"),
    *_obeyed("logprobs", "top_logprobs", "response_format", "stream", "stream_options"),
    *_obeyed("tools", "tool_choice", "parallel_tool_calls"),
    *_obeyed("reasoning_effort", why="where the model's chat template knows it"),
    *(_PREDICTION, _SPECULATIVE),
    *_granted("cache_control", "messages[].cache_control", "tools[].cache_control", why=_CACHE),
    *_granted("messages[].content[].cache_control", why=_CACHE),
    *_granted("messages[].content[].prompt_cache_breakpoint", why=_CACHE),
    *_ignored("prompt_cache_options", "prompt_cache_retention", why=_CACHE),
    *_ignored("verbosity", why="it is not passed to the model", same=("medium",)),
    *_ignored("moderation", why=_NO_MODERATION, same=({},)),
    *_ignored("stream_options.include_obfuscation", why=_OBFUSCATION, same=(False,)),
    *_refused("web_search_options", why=_NO_TOOLS_HERE),
    *_refused("audio", why="answers are text"),
    *_refused("tools[].type", why="tools are functions", same=("function",), stays=True),
    *_refused("functions", why="it is of the past, send tools instead"),
    *_refused("function_call", why="it is of the past, send tool_choice instead"),
    *_refused("thinking_token_budget", why=_NO_BUDGET, stays=True),
    *_COMMON,
)

_COMPLETION = (
    *_obeyed("model", "prompt", "max_tokens", "n", "seed", "stop", "echo", "logprobs"),
    *_obeyed("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias"),
    *_obeyed("stream", "stream_options"),
    _SPECULATIVE,
    *_refused("prompt_embeds", why="prompts are texts or token ids", same=([],)),
    *_refused("suffix", why="the model does not fill in gaps", same=("",)),
    *_refused("best_of", why="it is of the past, send n instead", same=(1,)),
    *_ignored("stream_options.include_obfuscation", why=_OBFUSCATION, same=(False,)),
    *_refused("thinking_token_budget", why=_NO_BUDGET, stays=True),
    *_COMMON,
)

_HOSTED = "tools are functions of the client; " + _NO_TOOLS_HERE
_NO_CONVERSATIONS = "conversations have no ids here; send previous_response_id"
_NO_PROMPTS = "this server has no stored prompts"
_ITEMS = (
    *_obeyed("model", "input", "instructions"),
    *_obeyed("previous_response_id", why="with --data-dir"),
    *_ignored("request_id", why=_NO_ID),
    *_obeyed("reasoning", why="effort, where the model's chat template knows it"),
    *_ignored(
        *("reasoning.summary", "reasoning.generate_summary"), why="reasoning is shown as it is"
    ),
    *_ignored("reasoning.mode", "reasoning.context", why="there is one", same=("standard", "auto")),
    *_granted("input[].content[].prompt_cache_breakpoint", why=_CACHE),
    *_ignored("prompt_cache_options", "prompt_cache_retention", why=_CACHE),
    _TIER,
    *_refused("conversation", why=_NO_CONVERSATIONS),
    *_refused("prompt", why=_NO_PROMPTS),
    *_refused(*("kv_transfer_params", "ec_transfer_params"), why=_TRANSFER, same=({},), stays=True),
)
_TOOLS = (
    FieldRule(
        "tools[]",
        FieldAction.IGNORED,
        "a search without external access finds nothing; Codex sends it by default",
        when={"type": "web_search", "external_web_access": False},
    ),
    *_refused("tools[].type", why=_HOSTED, same=("function", "namespace"), stays=True),
)
_SAMPLING = (
    *("max_output_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("structured_outputs", "skip_special_tokens", "include_stop_str_in_output", "watermarking"),
    *("vllm_xargs", "speculative"),
)
_SHOWN = (
    *("top_logprobs", "include", "include_reasoning", "enable_response_messages", "stream"),
    *("stream_options", "metadata", "user", "safety_identifier", "store", "background"),
    *("max_tool_calls", "moderation", "context_management", "client_metadata", "access_programs"),
    "image",
)
"""Fields about the contents of an answer and its storage."""
_NOT_PROMPT = "it changes nothing of the prompt"
_NO_OPTION = "a compaction has no such option"

_INPUT_TOKENS = (
    *_ITEMS,
    *_TOOLS,
    *_obeyed("tools", "tool_choice", "parallel_tool_calls", "truncation"),
    *_ignored("text", "prompt_cache_key", "personality", why=_NOT_PROMPT),
    *_ignored(*_SAMPLING, *_SHOWN, "cache_salt", "priority", "session_id", why=_NOT_PROMPT),
)
_COMPACT = (
    *_ITEMS,
    *_ignored("prompt_cache_key", why=_CACHE_KEY),
    *_refused("tools", "tool_choice", "parallel_tool_calls", "truncation", "text", why=_NO_OPTION),
    *_refused(*_SAMPLING, "previous_input_messages", why=_NO_OPTION),
    *_refused(*_SHOWN, why=_NO_OPTION, same=(False,)),
)
_RESPONSES = (
    *_ITEMS,
    *_TOOLS,
    *_obeyed("max_output_tokens", "temperature", "top_p", "top_logprobs", "text", "stream"),
    *_obeyed("tools", "tool_choice", "parallel_tool_calls", "truncation"),
    _SPECULATIVE,
    *_obeyed("metadata", "user", "prompt_cache_key", why="shown in the answer, without effect"),
    *_obeyed("max_tool_calls", why="about tools of the server, of which there are none"),
    *_obeyed("include", why="message.output_text.logprobs"),
    FieldRule(
        "include[]",
        FieldAction.IGNORED,
        "reasoning is shown as it is, and sent back as it is",
        only=("reasoning.encrypted_content",),
    ),
    *_refused(
        "include[]",
        why="there is nothing of the kind to show",
        same=("message.output_text.logprobs",),
        stays=True,
    ),
    *_ignored("stream_options", why=_OBFUSCATION, same=({}, {"include_obfuscation": False})),
    *_granted("safety_identifier", why="shown in the answer, without effect"),
    *_ignored("client_metadata", "access_programs", why=_LABEL),
    *_ignored("text.verbosity", why="it is not passed to the model", same=("medium",)),
    *_ignored("moderation", why=_NO_MODERATION, same=({},)),
    *_ignored("context_management", why="a prompt that becomes too long is a 400", same=([],)),
    *_ignored("image", why="there are no images", same=({},)),
    *_obeyed("store", "background", why="with --data-dir"),
)

FIELD_RULES: Mapping[Endpoint, tuple[FieldRule, ...]] = {
    **{endpoint: _POOLED if endpoint.pools else _COMMON for endpoint in Endpoint},
    Endpoint.MESSAGES: _MESSAGES,
    Endpoint.COUNT_TOKENS: _MESSAGES,
    Endpoint.CHAT: _CHAT,
    Endpoint.COMPLETION: _COMPLETION,
    Endpoint.RESPONSES: _RESPONSES,
    Endpoint.INPUT_TOKENS: _INPUT_TOKENS,
    Endpoint.COMPACT: _COMPACT,
}


def extra_schemas(endpoint: Endpoint) -> dict[str, JsonObject]:
    """Return the JSON schemas of accepted fields that the request model does not have."""
    found: dict[str, JsonObject] = {}
    for row in FIELD_RULES[endpoint]:
        if "[" in row.path or "." in row.path:
            continue
        if row.schema:
            found[row.path] = {**row.schema, "description": f"{row.why.capitalize()}."}
        elif row.action in (FieldAction.GRANTED, FieldAction.IGNORED):
            found[row.path] = {"description": f"{row.action.value.capitalize()}: {row.why}."}
        elif row.action is FieldAction.REFUSED and row.same and not row.stays:
            found[row.path] = {"enum": [*row.same, None]}
    return found


def refused_fields(endpoint: Endpoint) -> frozenset[str]:
    """Return the names of refused fields."""
    return frozenset(
        row.path
        for row in FIELD_RULES[endpoint]
        if row.action is FieldAction.REFUSED and not row.path.count("[") and not row.path.count(".")
    )
