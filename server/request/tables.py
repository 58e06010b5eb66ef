"""Tables of the fields of each API, in the order in which their rules are applied; and lookups.

The documented names are those of Anthropic's and OpenAI's own clients (their typed parameters,
compared by tests/server/request/test_fields.py); docs/http_api.md is generated from them.
What depends on the served model is decided in `server.request.options`. Pure data.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from server.wire import Endpoint, JsonObject


class FieldKind(enum.Enum):
    """Content of a field: selects its size limit in `sizes` and its check in `values`.

    From NAME on, a field is one value or one object of options.
    """

    MESSAGES = enum.auto()
    CONVERSATION = enum.auto()
    """Items or parts of a conversation; or a text."""
    PROMPTS = enum.auto()
    """A text, token ids, or a list of either."""
    TEXT = enum.auto()
    """A text that is joined to prompts."""
    TOKENS = enum.auto()
    """Token ids of one text."""
    IDS = enum.auto()
    """Token ids of an option."""
    BIASES = enum.auto()
    TOOLS = enum.auto()
    GRAMMAR = enum.auto()
    """Constraints of an answer; the gate of structured outputs has further limits."""
    WORDS = enum.auto()
    """A few short texts."""
    STOP = enum.auto()
    TEMPLATE = enum.auto()
    NAME = enum.auto()
    """A short text."""
    OPTIONS = enum.auto()
    """One value, or an object of options or of a client's own labels."""
    EXTRA_ARGS = enum.auto()
    """Options of logits processors and KV events."""
    TRANSFER = enum.auto()
    """Where the KV of a prompt is, or that it is to be kept for another server."""
    MEDIA = enum.auto()
    """Options of images, audio and video."""
    EFFORT = enum.auto()
    ANSWERS = enum.auto()
    PRIORITY = enum.auto()
    BEAM_SEARCH = enum.auto()
    MAX_TOKENS = enum.auto()
    TRUNCATION = enum.auto()
    DIMENSIONS = enum.auto()
    ENCODING = enum.auto()


class FieldAction(enum.Enum):
    OBEYED = "obeyed"
    """The request model has it."""
    GRANTED = "granted"
    """The server always does this; the field is removed."""
    IGNORED = "ignored"
    """The field is removed and named in a header of the answer, which is correct without it."""
    REFUSED = "refused"
    """An answer without it would be wrong."""


class PromptRole(enum.Enum):
    """Part of a field in the prompts of a request."""

    COUNTED = "counted"
    """Each of its prompts has an answer; errors about a too long prompt name this field."""
    CONTEXT = "context"
    """Joined to the counted prompts."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an API; `path` has `[]` for the items of an array.

    `action` None leaves it to the request model, and the docs omit it. `same` are the values,
    besides null, that mean the default: they are accepted. `stays`: accepted values are left in the
    body. `when` limits the rule to objects with these entries, `only` to these values. `schema` is
    the schema of an obeyed field that the request model does not have. `code` is the error code for
    Anthropic's clients. `needs` is a field that must be true beside this one, unless the value is
    in `idle`. `without_beams`: beam search accepts the values of `idle` alone.
    """

    path: str
    action: FieldAction | None = None
    why: str = ""
    kind: FieldKind = FieldKind.OPTIONS
    prompt: PromptRole | None = None
    same: tuple[object, ...] = ()
    stays: bool = False
    when: Mapping[str, object] = field(default_factory=dict)
    only: tuple[object, ...] = ()
    schema: Mapping[str, object] = field(default_factory=dict)
    code: str | None = None
    needs: str = ""
    idle: tuple[object, ...] = ()
    without_beams: bool = False


def _fields(kind: FieldKind, *names: str, **columns: Any) -> Iterable[Field]:
    return (Field(name, kind=kind, **columns) for name in names)


_not_with_beams = partial(_fields, without_beams=True)


# In the order of their checks.
SHARED: tuple[Field, ...] = (
    *_fields(FieldKind.NAME, "model", "cache_salt", "input_type", "user", "previous_response_id"),
    *_fields(FieldKind.NAME, "prompt_cache_key", "request_id", "session_id"),
    *_fields(FieldKind.ANSWERS, "n"),
    *_fields(FieldKind.PRIORITY, "priority"),
    *_fields(FieldKind.EXTRA_ARGS, "vllm_xargs"),
    *_fields(FieldKind.BEAM_SEARCH, "use_beam_search"),
    *_fields(FieldKind.OPTIONS, "length_penalty", needs="use_beam_search", idle=(1,)),
    *_not_with_beams(FieldKind.STOP, "stop", idle=([], "")),
    *_fields(FieldKind.STOP, "stop_sequences"),
    *_not_with_beams(FieldKind.IDS, "stop_token_ids", idle=([], "")),
    *_not_with_beams(FieldKind.WORDS, "bad_words", idle=([], "")),
    *_not_with_beams(FieldKind.IDS, "allowed_token_ids", idle=([], "")),
    *_fields(FieldKind.IDS, "logprob_token_ids"),
    *_not_with_beams(FieldKind.OPTIONS, "min_tokens", "min_p", idle=(0,)),
    *_not_with_beams(FieldKind.OPTIONS, "presence_penalty", "frequency_penalty", idle=(0,)),
    *_not_with_beams(FieldKind.OPTIONS, "top_p", "repetition_penalty", idle=(1,)),
    *_not_with_beams(FieldKind.OPTIONS, "top_k", idle=(0, -1)),
    *_not_with_beams(FieldKind.BIASES, "logit_bias", idle=({},)),
    *_not_with_beams(FieldKind.GRAMMAR, "response_format", idle=({"type": "text"},)),
    *_not_with_beams(FieldKind.OPTIONS, "tool_choice", idle=("none", "auto")),
    *_not_with_beams(FieldKind.OPTIONS, "seed", "prompt_logprobs"),
    *_not_with_beams(FieldKind.GRAMMAR, "structured_outputs"),
    *_fields(FieldKind.GRAMMAR, "output_config", "text"),
    *_fields(FieldKind.WORDS, "include", "embedding_types"),
    *_fields(FieldKind.MAX_TOKENS, "max_tokens", "max_completion_tokens", "max_output_tokens"),
    *_fields(FieldKind.TOOLS, "tools"),
    *_fields(FieldKind.MESSAGES, "messages"),
    *_fields(FieldKind.CONVERSATION, "previous_input_messages", "system", "prediction"),
    *_fields(FieldKind.PROMPTS, "prompt", "input", "texts", "inputs", "images", "documents"),
    *_fields(FieldKind.PROMPTS, "items", "data_2", "text_2", "query", "queries", "data_1"),
    *_fields(FieldKind.PROMPTS, "text_1"),
    *_fields(FieldKind.TEXT, "suffix", "instruction", "instructions", "prompt_embeds"),
    *_fields(FieldKind.TOKENS, "tokens"),
    *_fields(FieldKind.TRUNCATION, "truncate_prompt_tokens"),
    *_fields(FieldKind.DIMENSIONS, "dimensions", "output_dimension"),
    *_fields(FieldKind.ENCODING, "encoding_format"),
    *_fields(FieldKind.OPTIONS, "metadata", "reasoning", "repetition_detection"),
    *_fields(FieldKind.OPTIONS, "chat_template_kwargs", "kv_transfer_params", "ec_transfer_params"),
    *_fields(FieldKind.MEDIA, "mm_processor_kwargs", "media_io_kwargs"),
    *_fields(FieldKind.OPTIONS, "stream_options", "stream_interval", needs="stream"),
    *_fields(FieldKind.TEMPLATE, "chat_template"),
)
MAX_TOKENS_FIELDS = tuple(row.path for row in SHARED if row.kind is FieldKind.MAX_TOKENS)
LOGPROBS_FIELDS = ("logprobs", "top_logprobs", "prompt_logprobs")

OPENAI_TIERS = ("auto", "default", "flex", "priority")
ANTHROPIC_TIERS = ("auto", "standard_only")
"""Values of `service_tier`."""


_SHARED_ROWS = {row.path: row for row in SHARED}


def _rows(action: FieldAction, *paths: str, why: str = "", **columns: Any) -> tuple[Field, ...]:
    return tuple(
        replace(_SHARED_ROWS.get(path, Field(path)), action=action, why=why, **columns)
        for path in paths
    )


obeyed = partial(_rows, FieldAction.OBEYED)
granted = partial(_rows, FieldAction.GRANTED)
ignored = partial(_rows, FieldAction.IGNORED)
refused = partial(_rows, FieldAction.REFUSED)


_LABEL = "a label of the client, without effect"
_CACHE = "prefixes are cached automatically, until their blocks are evicted"
_CACHE_KEY = "prefixes are found by their tokens"
_NO_STORE = "answers of this API are not stored"
_NO_ID = "the header X-Request-Id sets the request id"
_NO_MIROSTAT = "the sampler has temperature, top_p, top_k and min_p"
_NO_TOOLS_HERE = "this server runs no tools"
_NO_MODERATION = "there is no moderation"
_OBFUSCATION = "streams are not padded"
_TRANSFER = "no KV or encoder cache is transferred"
_ELSEWHERE = "it is an option of another provider; chat_template_kwargs sets template variables"
_EFFORT = "where the model's chat template has the variable"
_NO_BUDGET = "thinking tokens are not counted separately; max_tokens limits both"

_SPECULATIVE = obeyed(
    "speculative",
    why="`false` disables drafts for this request, without a change of the answer; `true` is "
    "ignored by a server without speculation",
    schema={"type": ["boolean", "null"]},
)
_PROGRESS = obeyed(
    "return_progress",
    why="chunks of a stream with the progress of a long prompt, as of llama.cpp's server",
    schema={"type": ["boolean", "null"]},
)
_PREDICTION = obeyed(
    "prediction",
    why="drafts for one answer; ignored by a server without speculation",
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

_TIER = obeyed(
    "service_tier",
    why="service tier: auto, default, flex or priority",
    schema={"enum": [*OPENAI_TIERS, None]},
)
_ANTHROPIC_TIER = obeyed(
    "service_tier",
    why="service tier: auto or standard_only",
    schema={"enum": [*ANTHROPIC_TIERS, None]},
)

_NO_CALLS = "it is deprecated; send tool_calls instead"
_OTHERS = tuple("thinking enable_thinking think reasoning provider options chat_id".split())
"""Fields that clients of other providers send by default."""
_TURNS = (
    *ignored("messages[].id", "messages[].tool_calls[].extra_content", why=_LABEL),
    *ignored("messages[].is_error", why="the content of a result says it", same=(False,)),
    *obeyed("messages[].reasoning_content", why="as `reasoning`"),
    *ignored("messages[].annotations", why="they are not shown to the model", same=([],)),
    *ignored(
        "messages[].provider_specific_fields",
        "messages[].reasoning_details",
        "messages[].thinking_blocks",
        "messages[].parsed",
        why="added to answers by gateways and clients; not shown to the model",
    ),
    *granted("messages[].tool_calls[].index", why="calls are in the order of the list"),
    *granted("messages[].tool_calls[].function.parsed_arguments", why="it is `arguments`, parsed"),
    *refused("messages[].function_call", why=_NO_CALLS),
    *refused("messages[].audio", why="conversations are text"),
)
"""Fields of earlier answers that clients send again."""

_COMMON = (
    *_TURNS,
    *ignored("user", "metadata", "safety_identifier", why=_LABEL),
    *ignored("prompt_cache_key", why=_CACHE_KEY),
    *_TIER,
    *ignored("store", why=_NO_STORE, same=(False,)),
    *ignored("request_id", why=_NO_ID),
    *ignored("cache_prompt", why=_CACHE, same=(True,)),
    *ignored("keep_alive", why="the model stays loaded"),
    *ignored("mirostat", "mirostat_tau", "mirostat_eta", why=_NO_MIROSTAT, same=(0,)),
    *refused("modalities", why="answers are text", same=(["text"],)),
    *refused("kv_transfer_params", "ec_transfer_params", why=_TRANSFER, same=({},), stays=True),
    *refused(
        "return_token_offsets",
        "return_assistant_tokens_mask",
        "routed_experts_prompt_start",
        why="it has no effect on this server",
        same=(False, 0),
        stays=True,
    ),
)
"""Rules of every endpoint without a table of its own."""

_POOLED = (
    *refused(
        "padding",
        why="prompts are not padded: the model would attend to what is added",
        same=("do_not_pad",),
        stays=True,
    ),
    *_COMMON,
)

_MESSAGES = (
    *obeyed("model", "messages", "max_tokens", "system", "stop_sequences", "stream"),
    *obeyed("temperature", "top_p", "top_k", "tools", "tool_choice", "output_config"),
    *ignored("request_id", why=_NO_ID),
    *obeyed("thinking", why="by the switch of the model's chat template, where it has one"),
    *granted("cache_control", "system[].cache_control", "tools[].cache_control", why=_CACHE),
    *granted("messages[].content[].cache_control", why=_CACHE),
    *granted("messages[].content[].content[].cache_control", why=_CACHE),
    *ignored("metadata", "user_profile_id", "workspace_id", why=_LABEL),
    *ignored("billing_policy", why="requests are not billed"),
    *_ANTHROPIC_TIER,
    *ignored("speed", why="only the default is supported", same=("standard",)),
    *ignored("diagnostics", why="usage.cache_read_input_tokens is the length of the match"),
    *ignored("fallbacks", "fallback_credit_token", why="no request is declined by policy"),
    *ignored(
        "context_management",
        why="prompts are not edited; one that becomes too long is a 400",
        same=(
            {},
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
        ),
    ),
    *obeyed("output_config.effort", why=_EFFORT, kind=FieldKind.EFFORT),
    *ignored("output_config.task_budget", why="it is not passed to the model"),
    *ignored("thinking.display", why="thinking is returned unchanged", same=("summarized",)),
    *ignored("thinking.budget_tokens", why=_NO_BUDGET),
    *ignored(
        "system[].citations", "messages[].content[].citations", why="citations are not generated"
    ),
    *ignored("messages[].content[].caller", "messages[].content[].toolset_name", why=_LABEL),
    *ignored("tools[].input_examples", why="they are not shown to the model"),
    *ignored("tools[].eager_input_streaming", why="input streams as it is generated", same=(True,)),
    *refused("tools[].allowed_callers", why="the model calls tools directly", same=(["direct"],)),
    *refused(
        "tools[].type",
        why="tools are those of the client, with an input_schema; " + _NO_TOOLS_HERE,
        same=("custom",),
    ),
    *refused(
        "messages[].content[].type",
        why="conversations consist of text, images, thinking and calls of the client's tools",
        same="""
            text image thinking redacted_thinking tool_use tool_result tool_reference
        """.split(),
        stays=True,
    ),
    *refused("mcp_servers", why=_NO_TOOLS_HERE, same=([],)),
    *refused("container", why="this server runs no code", same=({},)),
    *refused(
        "thread",
        why="threads are not supported; the client sends the whole conversation",
        # Anthropic's client then sends the whole conversation, as it did before threads.
        code="thread_unsupported_request",
    ),
    *refused("compaction", why="this server summarizes no conversations"),
    *refused("inference_geo", why="this server has no regions", same=("global",)),
    *refused("kv_transfer_params", "ec_transfer_params", why=_TRANSFER, same=({},), stays=True),
)

_CHAT = (
    *obeyed("model", "messages", "max_tokens", "max_completion_tokens", "n", "seed", "stop"),
    *obeyed("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias"),
    *obeyed("logprobs", "top_logprobs", "response_format", "stream", "stream_options"),
    *obeyed("tools", "tool_choice", "parallel_tool_calls"),
    *obeyed("reasoning_effort", why=_EFFORT, kind=FieldKind.EFFORT),
    *_PREDICTION,
    *_PROGRESS,
    *_SPECULATIVE,
    *granted("cache_control", "messages[].cache_control", "tools[].cache_control", why=_CACHE),
    *granted("messages[].content[].cache_control", why=_CACHE),
    *granted("messages[].content[].prompt_cache_breakpoint", why=_CACHE),
    *ignored("prompt_cache_options", "prompt_cache_retention", why=_CACHE),
    *ignored("verbosity", why="it is not passed to the model", same=("medium",)),
    *ignored(*_OTHERS, why=_ELSEWHERE),
    *ignored("moderation", why=_NO_MODERATION, same=({},)),
    *ignored("stream_options.include_obfuscation", why=_OBFUSCATION, same=(False,)),
    *refused("web_search_options", why=_NO_TOOLS_HERE),
    *refused("audio", why="answers are text"),
    *refused(
        "tools[].type",
        why="tools are functions and custom tools",
        same=("function", "custom"),
        stays=True,
    ),
    *refused("functions", why="it is deprecated; send tools instead"),
    *refused("function_call", why="it is deprecated; send tool_choice instead"),
    *refused("thinking_token_budget", why=_NO_BUDGET, stays=True),
    *_COMMON,
)

_COMPLETION = (
    *ignored(*_OTHERS, why=_ELSEWHERE),
    *obeyed("model", "prompt", "max_tokens", "n", "seed", "stop", "echo", "logprobs"),
    *obeyed("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias"),
    *obeyed("stream", "stream_options"),
    *_PROGRESS,
    *_SPECULATIVE,
    *refused("prompt_embeds", why="prompts are texts or token ids", same=([],)),
    *refused("suffix", why="the model does not fill in gaps", same=("",)),
    *refused("best_of", why="it is deprecated; send n instead", same=(1,)),
    *ignored("stream_options.include_obfuscation", why=_OBFUSCATION, same=(False,)),
    *refused("thinking_token_budget", why=_NO_BUDGET, stays=True),
    *_COMMON,
)

_HOSTED = "tools are functions and custom tools of the client; " + _NO_TOOLS_HERE
_NO_CONVERSATIONS = "conversations have no ids here; send previous_response_id"
_NO_PROMPTS = "this server has no stored prompts"
_ITEMS = (
    *obeyed("model", "input", "instructions"),
    *obeyed("previous_response_id", why="with --data-dir"),
    *ignored("request_id", why=_NO_ID),
    *obeyed("reasoning"),
    *obeyed("reasoning.effort", why=_EFFORT, kind=FieldKind.EFFORT),
    *ignored(
        "reasoning.summary", "reasoning.generate_summary", why="reasoning is returned unchanged"
    ),
    *ignored(
        "reasoning.mode",
        "reasoning.context",
        why="only the default is supported",
        same=("standard", "auto"),
    ),
    *granted("input[].content[].prompt_cache_breakpoint", why=_CACHE),
    *ignored("prompt_cache_options", "prompt_cache_retention", why=_CACHE),
    *_TIER,
    *refused("conversation", why=_NO_CONVERSATIONS),
    *refused("prompt", why=_NO_PROMPTS, kind=FieldKind.OPTIONS),
    *refused("kv_transfer_params", "ec_transfer_params", why=_TRANSFER, same=({},), stays=True),
)
_TOOLS = (
    *ignored(
        "tools[]",
        why="a search without external access finds nothing; Codex sends it by default",
        when={"type": "web_search", "external_web_access": False},
    ),
    *refused("tools[].type", why=_HOSTED, same=("function", "custom", "namespace"), stays=True),
)
_SAMPLING = """
    max_output_tokens temperature top_p top_k seed stop ignore_eos presence_penalty
    frequency_penalty repetition_penalty logit_bias structured_outputs skip_special_tokens
    include_stop_str_in_output watermarking vllm_xargs speculative
""".split()
_SHOWN = """
    top_logprobs include include_reasoning enable_response_messages stream stream_options metadata
    user safety_identifier store background max_tool_calls moderation context_management
    client_metadata access_programs image
""".split()
"""Fields about the contents of an answer and its storage."""
_NOT_PROMPT = "it does not change the prompt"
_NO_OPTION = "a compaction has no such option"

_INPUT_TOKENS = (
    *_ITEMS,
    *_TOOLS,
    *obeyed("tools", "tool_choice", "parallel_tool_calls", "truncation"),
    *ignored("text", "prompt_cache_key", "personality", why=_NOT_PROMPT),
    *ignored(*_SAMPLING, *_SHOWN, "cache_salt", "priority", "session_id", why=_NOT_PROMPT),
)
_COMPACT = (
    *_ITEMS,
    *ignored("prompt_cache_key", why=_CACHE_KEY),
    *refused("tools", "tool_choice", "parallel_tool_calls", "truncation", "text", why=_NO_OPTION),
    *refused(*_SAMPLING, "previous_input_messages", why=_NO_OPTION),
    *refused(*_SHOWN, why=_NO_OPTION, same=(False,)),
)
_RESPONSES = (
    *_ITEMS,
    *_TOOLS,
    *obeyed("max_output_tokens", "temperature", "top_p", "top_logprobs", "text", "stream"),
    *obeyed("tools", "tool_choice", "parallel_tool_calls", "truncation"),
    *_SPECULATIVE,
    *obeyed("metadata", "user", "prompt_cache_key", why="shown in the answer, without effect"),
    *obeyed("max_tool_calls", why="limits tools of the server, which has none"),
    *obeyed("include", why="message.output_text.logprobs"),
    *ignored(
        "include[]", why="reasoning is returned unencrypted", only=("reasoning.encrypted_content",)
    ),
    *refused(
        "include[]",
        why="this server has no such output",
        same=("message.output_text.logprobs",),
        stays=True,
    ),
    *ignored("stream_options", why=_OBFUSCATION, same=({}, {"include_obfuscation": False})),
    *granted("safety_identifier", why="shown in the answer, without effect"),
    *ignored("client_metadata", "access_programs", why=_LABEL),
    *ignored("text.verbosity", why="it is not passed to the model", same=("medium",)),
    *ignored("moderation", why=_NO_MODERATION, same=({},)),
    *ignored("context_management", why="a prompt that becomes too long is a 400", same=([],)),
    *ignored("image", why="there are no images", same=({},)),
    *obeyed("store", "background", why="with --data-dir"),
)

# A router sends the body of a generation unchanged to be rendered: fields without a place in the
# answer are accepted and named in the header of ignored fields.
_NO_PLACE = "it is neither in the prompt nor in the sampling parameters"

RENDERED = (
    *obeyed("return_token_offsets", why="in `token_offsets`, for texts"),
    *refused(
        "use_beam_search", why="a beam search has no sampling parameters", same=(False,), stays=True
    ),
    *ignored("prediction", "return_progress", why=_NO_PLACE),
    *ignored("speculative", "session_id", why=_NO_PLACE),
    *ignored("include_reasoning", "return_prompt_text", "return_token_ids", why=_NO_PLACE),
    *ignored("return_tokens_as_token_ids", why=_NO_PLACE),
)
"""Rules of both rendering endpoints."""
RENDERED_CHAT = (
    *RENDERED,
    *obeyed(
        "return_assistant_tokens_mask", why="where the chat template marks the assistant's tokens"
    ),
)

_TRANSFERRED = obeyed(
    "kv_transfer_params", why="with NixlConnector; a router sets it", kind=FieldKind.TRANSFER
)


def _table(
    rows: tuple[Field, ...],
    counted: tuple[str, ...],
    context: tuple[str, ...] = (),
    conversation: tuple[str, ...] = (),
) -> tuple[Field, ...]:
    """Return the documented `rows`, then the shared fields, with the roles of prompts."""
    named = {row.path for row in rows}
    roles = dict.fromkeys(counted, PromptRole.COUNTED) | dict.fromkeys(context, PromptRole.CONTEXT)
    table = (*rows, *(row for row in SHARED if row.path not in named))
    return tuple(
        replace(
            row,
            prompt=roles.get(row.path),
            kind=FieldKind.CONVERSATION if row.path in conversation else row.kind,
        )
        for row in table
    )


def _replaced(rows: tuple[Field, ...], others: tuple[Field, ...]) -> tuple[Field, ...]:
    """Return `rows` with `others` in place of those of the same path."""
    paths = {row.path for row in others}
    return (*others, *(row for row in rows if row.path not in paths))


_RERANKED = (
    *ignored("return_documents", why="results always hold their documents", same=(True,)),
    *refused("rank_fields", why="a document is ranked by its text alone", same=(["text"],)),
    *refused("max_chunks_per_doc", why="documents are not split into chunks", same=(1,)),
    *ignored("input_type", why="queries and documents are told apart by their fields"),
    *_POOLED,
)
_SCORED = _table(
    _RERANKED,
    counted=("documents", "items", "data_2", "text_2"),
    context=("query", "queries", "data_1", "text_1"),
)
_EMBEDDED = _table(_POOLED, counted=("messages", "input"))
_ITEM_FIELDS = ("instructions", "previous_input_messages")

FIELDS: Mapping[Endpoint, tuple[Field, ...]] = {
    # A chat template shows documents; they are not prompts.
    Endpoint.CHAT: _table(_replaced(_CHAT, _TRANSFERRED), ("messages",), (), ("documents",)),
    Endpoint.COMPLETION: _table(_replaced(_COMPLETION, _TRANSFERRED), ("prompt",), ("suffix",)),
    Endpoint.RENDER_CHAT: _table(
        _replaced(_CHAT, RENDERED_CHAT), counted=("messages",), conversation=("documents",)
    ),
    Endpoint.RENDER_COMPLETION: _table(
        _replaced(_COMPLETION, RENDERED), counted=("prompt",), context=("suffix",)
    ),
    Endpoint.RESPONSES: _table(_RESPONSES, ("input",), _ITEM_FIELDS, conversation=("input",)),
    Endpoint.INPUT_TOKENS: _table(_INPUT_TOKENS, ("input",), _ITEM_FIELDS, conversation=("input",)),
    Endpoint.COMPACT: _table(_COMPACT, ("input",), _ITEM_FIELDS, conversation=("input",)),
    Endpoint.MESSAGES: _table((*_MESSAGES, *_SPECULATIVE), ("messages",), ("system",)),
    Endpoint.COUNT_TOKENS: _table(_MESSAGES, ("messages",), ("system",)),
    Endpoint.TOKENIZE: _table(_COMMON, counted=("messages", "prompt")),
    Endpoint.DETOKENIZE: _table(_COMMON, counted=("tokens",)),
    Endpoint.COHERE_EMBED: _table(_POOLED, counted=("texts", "inputs", "images")),
    **dict.fromkeys((Endpoint.EMBEDDINGS, Endpoint.POOLING, Endpoint.CLASSIFY), _EMBEDDED),
    **{endpoint: _SCORED for endpoint in Endpoint if endpoint.scores},
}


@cache
def fields_by_name(endpoint: Endpoint) -> dict[str, Field]:
    """Return the fields of a body by name, the shared ones first, in the order of their checks."""
    rows = {row.path: row for row in FIELDS[endpoint] if not {"[", "."} & {*row.path}}
    return {**{row.path: row for row in SHARED}, **rows}


@cache
def fields_of_kind(endpoint: Endpoint, kind: FieldKind) -> tuple[str, ...]:
    return tuple(path for path, row in fields_by_name(endpoint).items() if row.kind is kind)


@cache
def content_fields(endpoint: Endpoint) -> frozenset[str]:
    """Return the fields with prompts, messages, tools or grammars."""
    rows = fields_by_name(endpoint).items()
    return frozenset(name for name, row in rows if row.kind.value < FieldKind.NAME.value)


@cache
def prompt_fields(endpoint: Endpoint) -> tuple[str, ...]:
    """Return the names of the fields with prompts, those with an answer for each prompt first."""
    rows = [row for row in fields_by_name(endpoint).values() if row.prompt is not None]
    return tuple(r.path for r in sorted(rows, key=lambda r: r.prompt is PromptRole.CONTEXT))


def error_field(endpoint: Endpoint, body: JsonObject) -> str | None:
    """Return the field that errors about a too long prompt name, or None."""
    rows = fields_by_name(endpoint)
    counted = (name for name in prompt_fields(endpoint) if rows[name].prompt is PromptRole.COUNTED)
    return next((name for name in counted if name in body), None)


@cache
def effort_path(endpoint: Endpoint) -> str:
    """Return the path of the effort of thinking, empty for an API without one."""
    return next((row.path for row in FIELDS[endpoint] if row.kind is FieldKind.EFFORT), "")


def obeys(endpoint: Endpoint, name: str) -> bool:
    """Return True if an API documents a field and the server acts on it."""
    row = fields_by_name(endpoint).get(name)
    return row is not None and row.action is FieldAction.OBEYED


def extra_schemas(endpoint: Endpoint) -> dict[str, JsonObject]:
    """Return the JSON schemas of accepted fields that the request model does not have."""
    schemas: dict[str, JsonObject] = {}
    for name, row in fields_by_name(endpoint).items():
        if row.schema:
            schemas[name] = {**row.schema, "description": f"{row.why.capitalize()}."}
        elif row.action in (FieldAction.GRANTED, FieldAction.IGNORED):
            schemas[name] = {"description": f"{row.action.value.capitalize()}: {row.why}."}
        elif row.action is FieldAction.REFUSED and row.same and not row.stays:
            schemas[name] = {"enum": [*row.same, None]}
    return schemas


def refused_fields(endpoint: Endpoint) -> frozenset[str]:
    rows = fields_by_name(endpoint).items()
    return frozenset(name for name, row in rows if row.action is FieldAction.REFUSED)
