"""Tables of the fields of each API, in the order in which their rules are applied.

The documented names are those of Anthropic's and OpenAI's own clients (their typed parameters,
compared by tests/server/request/test_field_rules.py); docs/http_api.md is generated from them.
What depends on the served model is decided in `server.request.thinking`. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from server.request.fields.field import Field, FieldAction, FieldKind, PromptRole
from server.request.fields.kv_transfer import TRANSFERRED
from server.request.fields.rendered import RENDERED, RENDERED_CHAT
from server.request.fields.rows import granted as _granted
from server.request.fields.rows import ignored as _ignored
from server.request.fields.rows import obeyed as _obeyed
from server.request.fields.rows import refused as _refused
from server.request.fields.rows import row as _row
from server.request.fields.shared import ANTHROPIC_TIERS, OPENAI_TIERS, SHARED
from server.wire.endpoint import Endpoint

_LABEL = "a label of the client, without effect"
_CACHE = "prefixes are cached automatically, until their blocks are evicted"
_CACHE_KEY = "prefixes are found by their tokens"
_NO_STORE = "answers of this API are not stored"
_NO_ID = "the header X-Request-Id sets the request id"
_NO_MIROSTAT = "the sampler has temperature, top_p, top_k and min_p"
_NO_TOOLS_HERE = "this server runs no tools"
_NO_MODERATION = "there is no moderation"
_OBFUSCATION = "streams are not padded"
_TRANSFER = "no KV cache is transferred"
_ELSEWHERE = "it is an option of another provider; chat_template_kwargs sets template variables"
_EFFORT = "where the model's chat template has the variable"
_NO_BUDGET = "thinking tokens are not counted separately; max_tokens limits both"

_SPECULATIVE = _row(
    "speculative",
    FieldAction.OBEYED,
    "`false` disables drafts for this request, without a change of the answer; `true` is ignored "
    "by a server without speculation",
    schema={"type": ["boolean", "null"]},
)
_PROGRESS = _row(
    "return_progress",
    FieldAction.OBEYED,
    "chunks of a stream with the progress of a long prompt, as of llama.cpp's server",
    schema={"type": ["boolean", "null"]},
)
_PREDICTION = _row(
    "prediction",
    FieldAction.OBEYED,
    "drafts for one answer; ignored by a server without speculation",
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

_TIER = _row(
    "service_tier",
    FieldAction.OBEYED,
    "service tier: auto, default, flex or priority",
    schema={"enum": [*OPENAI_TIERS, None]},
)
_ANTHROPIC_TIER = _row(
    "service_tier",
    FieldAction.OBEYED,
    "service tier: auto or standard_only",
    schema={"enum": [*ANTHROPIC_TIERS, None]},
)

_NO_CALLS = "it is deprecated; send tool_calls instead"
_OTHERS = (
    *("thinking", "enable_thinking", "think", "reasoning", "provider", "options", "chat_id"),
)
"""Fields that clients of other providers send by default."""
_TURNS = (
    *_ignored("messages[].id", "messages[].tool_calls[].extra_content", why=_LABEL),
    *_ignored("messages[].is_error", why="the content of a result says it", same=(False,)),
    *_obeyed("messages[].reasoning_content", why="as `reasoning`"),
    *_ignored("messages[].annotations", why="they are not shown to the model", same=([],)),
    *_ignored(
        *("messages[].provider_specific_fields", "messages[].reasoning_details"),
        *("messages[].thinking_blocks", "messages[].parsed"),
        why="added to answers by gateways and clients; not shown to the model",
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
    *_granted("cache_control", "system[].cache_control", "tools[].cache_control", why=_CACHE),
    *_granted("messages[].content[].cache_control", why=_CACHE),
    *_granted("messages[].content[].content[].cache_control", why=_CACHE),
    *_ignored("metadata", "user_profile_id", "workspace_id", why=_LABEL),
    *_ignored("billing_policy", why="requests are not billed"),
    _ANTHROPIC_TIER,
    *_ignored("speed", why="only the default is supported", same=("standard",)),
    *_ignored("diagnostics", why="usage.cache_read_input_tokens is the length of the match"),
    *_ignored("fallbacks", "fallback_credit_token", why="no request is declined by policy"),
    *_ignored(
        "context_management",
        why="prompts are not edited; one that becomes too long is a 400",
        same=(
            {},
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
        ),
    ),
    *_obeyed("output_config.effort", why=_EFFORT, kind=FieldKind.EFFORT),
    *_ignored("output_config.task_budget", why="it is not passed to the model"),
    *_ignored("thinking.display", why="thinking is returned unchanged", same=("summarized",)),
    *_ignored("thinking.budget_tokens", why=_NO_BUDGET),
    *_ignored(
        "system[].citations", "messages[].content[].citations", why="citations are not generated"
    ),
    *_ignored("messages[].content[].caller", "messages[].content[].toolset_name", why=_LABEL),
    *_ignored("tools[].input_examples", why="they are not shown to the model"),
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
        why="conversations consist of text, images, thinking and calls of the client's tools",
        same=(
            *("text", "image", "thinking", "redacted_thinking"),
            *("tool_use", "tool_result", "tool_reference"),
        ),
        stays=True,
    ),
    *_refused("mcp_servers", why=_NO_TOOLS_HERE, same=([],)),
    *_refused("container", why="this server runs no code", same=({},)),
    _row(
        "thread",
        FieldAction.REFUSED,
        "threads are not supported; the client sends the whole conversation",
        # Anthropic's client then sends the whole conversation, as it did before threads.
        code="thread_unsupported_request",
    ),
    *_refused("compaction", why="this server summarizes no conversations"),
    *_refused("inference_geo", why="this server has no regions", same=("global",)),
    *_refused(*("kv_transfer_params", "ec_transfer_params"), why=_TRANSFER, same=({},), stays=True),
)

_CHAT = (
    *_obeyed("model", "messages", "max_tokens", "max_completion_tokens", "n", "seed", "stop"),
    *_obeyed("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias"),
    *_obeyed("logprobs", "top_logprobs", "response_format", "stream", "stream_options"),
    *_obeyed("tools", "tool_choice", "parallel_tool_calls"),
    *_obeyed("reasoning_effort", why=_EFFORT, kind=FieldKind.EFFORT),
    *(_PREDICTION, _PROGRESS, _SPECULATIVE),
    *_granted("cache_control", "messages[].cache_control", "tools[].cache_control", why=_CACHE),
    *_granted("messages[].content[].cache_control", why=_CACHE),
    *_granted("messages[].content[].prompt_cache_breakpoint", why=_CACHE),
    *_ignored("prompt_cache_options", "prompt_cache_retention", why=_CACHE),
    *_ignored("verbosity", why="it is not passed to the model", same=("medium",)),
    *_ignored(*_OTHERS, why=_ELSEWHERE),
    *_ignored("moderation", why=_NO_MODERATION, same=({},)),
    *_ignored("stream_options.include_obfuscation", why=_OBFUSCATION, same=(False,)),
    *_refused("web_search_options", why=_NO_TOOLS_HERE),
    *_refused("audio", why="answers are text"),
    *_refused(
        "tools[].type",
        why="tools are functions and custom tools",
        same=("function", "custom"),
        stays=True,
    ),
    *_refused("functions", why="it is deprecated; send tools instead"),
    *_refused("function_call", why="it is deprecated; send tool_choice instead"),
    *_refused("thinking_token_budget", why=_NO_BUDGET, stays=True),
    *_COMMON,
)

_COMPLETION = (
    *_ignored(*_OTHERS, why=_ELSEWHERE),
    *_obeyed("model", "prompt", "max_tokens", "n", "seed", "stop", "echo", "logprobs"),
    *_obeyed("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias"),
    *_obeyed("stream", "stream_options"),
    *(_PROGRESS, _SPECULATIVE),
    *_refused("prompt_embeds", why="prompts are texts or token ids", same=([],)),
    *_refused("suffix", why="the model does not fill in gaps", same=("",)),
    *_refused("best_of", why="it is deprecated; send n instead", same=(1,)),
    *_ignored("stream_options.include_obfuscation", why=_OBFUSCATION, same=(False,)),
    *_refused("thinking_token_budget", why=_NO_BUDGET, stays=True),
    *_COMMON,
)

_HOSTED = "tools are functions and custom tools of the client; " + _NO_TOOLS_HERE
_NO_CONVERSATIONS = "conversations have no ids here; send previous_response_id"
_NO_PROMPTS = "this server has no stored prompts"
_ITEMS = (
    *_obeyed("model", "input", "instructions"),
    *_obeyed("previous_response_id", why="with --data-dir"),
    *_ignored("request_id", why=_NO_ID),
    *_obeyed("reasoning"),
    *_obeyed("reasoning.effort", why=_EFFORT, kind=FieldKind.EFFORT),
    *_ignored(
        *("reasoning.summary", "reasoning.generate_summary"), why="reasoning is returned unchanged"
    ),
    *_ignored(
        "reasoning.mode",
        "reasoning.context",
        why="only the default is supported",
        same=("standard", "auto"),
    ),
    *_granted("input[].content[].prompt_cache_breakpoint", why=_CACHE),
    *_ignored("prompt_cache_options", "prompt_cache_retention", why=_CACHE),
    _TIER,
    *_refused("conversation", why=_NO_CONVERSATIONS),
    *_refused("prompt", why=_NO_PROMPTS, kind=FieldKind.OPTIONS),
    *_refused(*("kv_transfer_params", "ec_transfer_params"), why=_TRANSFER, same=({},), stays=True),
)
_TOOLS = (
    _row(
        "tools[]",
        FieldAction.IGNORED,
        "a search without external access finds nothing; Codex sends it by default",
        when={"type": "web_search", "external_web_access": False},
    ),
    *_refused("tools[].type", why=_HOSTED, same=("function", "custom", "namespace"), stays=True),
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
_NOT_PROMPT = "it does not change the prompt"
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
    *_obeyed("max_tool_calls", why="limits tools of the server, which has none"),
    *_obeyed("include", why="message.output_text.logprobs"),
    _row(
        "include[]",
        FieldAction.IGNORED,
        "reasoning is returned unencrypted",
        only=("reasoning.encrypted_content",),
    ),
    *_refused(
        "include[]",
        why="this server has no such output",
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
    *_ignored("return_documents", why="results always hold their documents", same=(True,)),
    *_refused("rank_fields", why="a document is ranked by its text alone", same=(["text"],)),
    *_refused("max_chunks_per_doc", why="documents are not split into chunks", same=(1,)),
    *_ignored("input_type", why="queries and documents are told apart by their fields"),
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
    Endpoint.CHAT: _table(_replaced(_CHAT, TRANSFERRED), ("messages",), (), ("documents",)),
    Endpoint.COMPLETION: _table(_replaced(_COMPLETION, TRANSFERRED), ("prompt",), ("suffix",)),
    Endpoint.RENDER_CHAT: _table(
        _replaced(_CHAT, RENDERED_CHAT), counted=("messages",), conversation=("documents",)
    ),
    Endpoint.RENDER_COMPLETION: _table(
        _replaced(_COMPLETION, RENDERED), counted=("prompt",), context=("suffix",)
    ),
    Endpoint.RESPONSES: _table(_RESPONSES, ("input",), _ITEM_FIELDS, conversation=("input",)),
    Endpoint.INPUT_TOKENS: _table(_INPUT_TOKENS, ("input",), _ITEM_FIELDS, conversation=("input",)),
    Endpoint.COMPACT: _table(_COMPACT, ("input",), _ITEM_FIELDS, conversation=("input",)),
    Endpoint.MESSAGES: _table((*_MESSAGES, _SPECULATIVE), ("messages",), ("system",)),
    Endpoint.COUNT_TOKENS: _table(_MESSAGES, ("messages",), ("system",)),
    Endpoint.TOKENIZE: _table(_COMMON, counted=("messages", "prompt")),
    Endpoint.DETOKENIZE: _table(_COMMON, counted=("tokens",)),
    Endpoint.COHERE_EMBED: _table(_POOLED, counted=("texts", "inputs", "images")),
    **dict.fromkeys((Endpoint.EMBEDDINGS, Endpoint.POOLING, Endpoint.CLASSIFY), _EMBEDDED),
    **{endpoint: _SCORED for endpoint in Endpoint if endpoint.scores},
}
