"""Fields that mean the same in every API which has them, in the order of their checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from server.request.fields.field import Field, FieldKind


def _fields(kind: FieldKind, *names: str, **columns: Any) -> Iterable[Field]:
    return (Field(name, kind=kind, **columns) for name in names)


def _not_with_beams(kind: FieldKind, *names: str, idle: tuple[object, ...] = ()) -> Iterable[Field]:
    return _fields(kind, *names, idle=idle, without_beams=True)


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
REPLACED: Mapping[str, str] = {
    "best_of": "n",
    "normalize": "use_activation",
}
"""Fields of older vLLM versions, and their replacements."""

OPENAI_TIERS = ("auto", "default", "flex", "priority")
ANTHROPIC_TIERS = ("auto", "standard_only")
"""Values of `service_tier`."""
