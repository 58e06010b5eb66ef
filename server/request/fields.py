"""Rows of the tables of fields: kinds, conditions and rules; and the fields that every API shares.

Pure data.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any


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
