"""Fields and headers that this server acts on itself, before vLLM's models see a body.

Service tiers, priority and rank; progress and drafts; thinking and variables of chat templates.
Pure functions over plain bodies.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from rbln_backend.api.names import BACKGROUND_PRIORITY, FIRST_PRIORITY
from server.errors import (
    InvalidValueError,
    PermissionDeniedError,
    UnsupportedFieldError,
    describe,
    invalid_value,
)
from server.request.rules import UnknownPolicy, refuse_unknown, unknown_field
from server.request.tables import ANTHROPIC_TIERS, OPENAI_TIERS, effort_path, obeys
from server.tools import get_field
from server.wire import Endpoint, JsonObject

# Service tiers: priority classes of the engine's scheduler, by OpenAI's and Anthropic's names.

TIER_FIELD = "service_tier"
AUTO = "auto"
_STANDARD_TIER = "standard_only"


class Tier(enum.Enum):
    """Service tier; the value is OpenAI's name."""

    DEFAULT = "default"
    """Served in the order of `--prefill-policy`."""
    FLEX = "flex"
    """Served in rows that would be padding, and in idle steps."""
    PRIORITY = "priority"
    """Admitted before all other waiting requests."""

    def __init__(self, word: str) -> None:
        self.anthropic = {"default": "standard", "flex": "batch"}.get(word, word)
        self.engine_priority = {"flex": BACKGROUND_PRIORITY, "priority": FIRST_PRIORITY}.get(word)
        """Scheduler priority; None to use the request's own."""


Tiers = Sequence[Tier]
"""Tiers that a key may use; the first is the default, and `auto`."""
EVERY_TIER: Tiers = tuple(Tier)


def get_tiers(text: str) -> Tiers:
    """Return the tiers of `flex`, `priority+default` and their like. Raises `ValueError`."""
    return tuple(dict.fromkeys(Tier(word) for word in text.split("+")))


def pop_tier(endpoint: Endpoint, body: JsonObject) -> str | None:
    """Remove the tier from `body` and return OpenAI's name of it. Raises `InvalidValueError`."""
    requested = body.pop(TIER_FIELD, None)
    words = ANTHROPIC_TIERS if endpoint.anthropic else OPENAI_TIERS
    if requested is None:
        return None
    if requested not in words:
        known = ", ".join(repr(word) for word in words)
        raise invalid_value(TIER_FIELD, f"be one of {known}", requested)
    return Tier.DEFAULT.value if requested == _STANDARD_TIER else str(requested)


def granted_tier(requested: str | None, allowed: Tiers) -> Tier:
    """Return the tier of a request. Raises `PermissionDeniedError` for one that is not allowed."""
    if requested in (None, AUTO):
        return allowed[0]
    tier = Tier(requested)
    if tier not in allowed:
        names = ", ".join(repr(other.value) for other in allowed)
        raise PermissionDeniedError(
            f"{TIER_FIELD}: {tier.value!r} is not allowed for this API key; allowed: {names}.",
            param=TIER_FIELD,
        )
    return tier


# The field and the headers that schedule a request.

PRIORITY_HEADER = "X-Vllm-Priority"
RANK_HEADER = "X-data-parallel-rank"
_RANK = re.compile("[0-9]{1,6}")
_PRIORITY = re.compile("[+-]?[0-9]{1,12}")
_MAX_PRIORITY = BACKGROUND_PRIORITY - 1
"""Higher values are those of the service tiers `flex` and `priority`."""


def check_headers(
    headers: Headers, priority: object, tier: Tier | None, *, has_priorities: bool, num_ranks: int
) -> None:
    """Raise the `RequestError` of an invalid priority or rank, which vLLM would accept or ignore.

    `priority` is the field of the body; a tier that sets the priority allows none.
    """
    header, rank = headers.get(PRIORITY_HEADER), headers.get(RANK_HEADER)
    if header is not None:
        if not _PRIORITY.fullmatch(header):
            raise InvalidValueError(
                f"The header {PRIORITY_HEADER} must be an integer of at most 12 digits, got "
                f"{describe(header)}.",
                param=PRIORITY_HEADER,
            )
        check_priority(int(header), PRIORITY_HEADER, has_priorities=has_priorities)
    if tier is not None and tier.engine_priority is not None:
        for name, value in (("priority", priority), (PRIORITY_HEADER, header)):
            if value not in (None, 0, "0"):
                raise UnsupportedFieldError(
                    f"'{name}' has no effect in the service tier {tier.value!r}.", param=name
                )
    if rank is not None and (not _RANK.fullmatch(rank) or int(rank) >= num_ranks):
        raise InvalidValueError(
            f"The header {RANK_HEADER} must be a data-parallel rank of this server, 0 to "
            f"{num_ranks - 1}, got {describe(rank)}.",
            param=RANK_HEADER,
        )


def check_priority(value: object, name: str, *, has_priorities: bool) -> None:
    """Raise the `RequestError` of a priority that has no effect, or is not a small integer."""
    if not isinstance(value, int) or not value:
        return
    if not has_priorities:
        raise UnsupportedFieldError(
            f"'{name}' has no effect: this server was not started with "
            "--scheduling-policy priority.",
            param=name,
        )
    if abs(value) > _MAX_PRIORITY:
        raise invalid_value(name, f"be -{_MAX_PRIORITY} to {_MAX_PRIORITY}", value)


# Progress of a stream's prompt, by llama.cpp's name.

PROGRESS_FIELD = "return_progress"


def pop_progress(endpoint: Endpoint, body: JsonObject) -> tuple[bool, list[str]]:
    """Remove the field from `body`; return its value, and the fields without effect.

    Only a stream can have progress. Raises `InvalidValueError`.
    """
    if not obeys(endpoint, PROGRESS_FIELD):
        return False, []
    value = body.pop(PROGRESS_FIELD, None)
    if value is not None and not isinstance(value, bool):
        raise invalid_value(PROGRESS_FIELD, "be a boolean", value)
    streams = bool(body.get("stream"))
    return bool(value) and streams, [PROGRESS_FIELD] if value and not streams else []


# Drafts; none of their fields changes the answer.

_SPECULATIVE = "speculative"
_PREDICTION = "prediction"
DRAFT_FIELDS = frozenset((_SPECULATIVE, _PREDICTION))


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Draft options of a request.

    `off` disables drafts. `prediction` is the expected text of the answer, empty for none.
    """

    off: bool = False
    prediction: str = ""


def pop_drafts(
    endpoint: Endpoint, body: JsonObject, *, speculates: bool
) -> tuple[DraftOptions, list[str]]:
    """Remove the draft fields from `body`; return the options, and the fields without effect.

    `speculates`: the server verifies drafts. Raises `InvalidValueError` or `UnsupportedFieldError`.
    """
    if not obeys(endpoint, _SPECULATIVE):
        return DraftOptions(), []
    speculative = body.pop(_SPECULATIVE, None)
    if speculative is not None and not isinstance(speculative, bool):
        raise invalid_value(_SPECULATIVE, "be a boolean", speculative)
    predicted = body.pop(_PREDICTION, None) if obeys(endpoint, _PREDICTION) else None
    text = "" if predicted is None else _predicted_text(predicted)
    if predicted is not None and body.get("n") not in (None, 1):
        raise UnsupportedFieldError(
            f"'{_PREDICTION}' is of one answer, got 'n': {describe(body['n'])}; send requests of "
            "one answer each.",
            param=_PREDICTION,
        )
    off = speculative is False
    ignored = [_PREDICTION] if predicted is not None and (off or not speculates) else []
    if speculative and not speculates:
        ignored.append(_SPECULATIVE)
    return DraftOptions(off, "" if ignored else text), ignored


def _predicted_text(value: Any) -> str:
    if not isinstance(value, dict):
        raise invalid_value(_PREDICTION, "be an object", value)
    unknown = next((name for name in value if name not in ("type", "content")), None)
    if unknown is not None:
        raise InvalidValueError(
            f"Unknown field '{_PREDICTION}.{unknown}'; a prediction has a type and a content.",
            param=f"{_PREDICTION}.{unknown}",
        )
    if value.get("type") != "content":
        raise invalid_value(f"{_PREDICTION}.type", "be 'content'", value.get("type"))
    path, content = f"{_PREDICTION}.content", value.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_value(path, "be a text or a list of text parts", content)
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            must = "be a text part, {'type': 'text', 'text': ...}"
            raise invalid_value(f"{path}[{index}]", must, part)
        texts.append(text)
    return "".join(texts)


# Thinking, as the served model supports it.

_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that switch thinking: of Qwen and Granite, of DeepSeek."""
_EFFORT = "reasoning_effort"
THINKING_FIELDS = frozenset(("thinking", _EFFORT, "reasoning", "output_config"))
"""Fields of thinking, and those in which an API has its effort."""
_WANTED = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
"""Anthropic's types of `thinking`."""


@dataclass(frozen=True, slots=True)
class ThinkingSupport:
    """Support for thinking of the served model.

    `switch` is the variable of its chat template that turns thinking on. `effort`: the template has
    `reasoning_effort`. `parses`: thinking is separated from answers.
    """

    switch: str | None = None
    effort: bool = False
    parses: bool = False

    @classmethod
    def of(cls, template: str, *, parses: bool, harmony: bool) -> ThinkingSupport:
        """Return the support of a chat template; `harmony`: the model's format has an effort."""
        names = set(re.findall(r"\w+", template))
        switch = next((name for name in _THINKING_SWITCHES if name in names), None)
        return cls(switch, harmony or _EFFORT in names, parses)


def normalize_thinking(
    endpoint: Endpoint, body: JsonObject, thinking: ThinkingSupport
) -> list[str]:
    """Move a body's thinking fields to the request model's; return the paths without effect.

    Raises `InvalidValueError` for an unknown type of thinking.
    """
    ignored = _pop_thinking(body, thinking) if obeys(endpoint, "thinking") else []
    path = effort_path(endpoint)
    effort: object = body if path else None
    for name in path.split("."):
        effort = get_field(effort, name)
    # vLLM turns an effort into the switch of that name.
    has_effect = thinking.effort or thinking.switch == "enable_thinking"
    return ignored if effort is None or has_effect else [*ignored, path]


def _pop_thinking(body: JsonObject, thinking: ThinkingSupport) -> list[str]:
    value = body.pop("thinking", None)
    if value is None:
        return []
    kind = get_field(value, "type")
    thinks = _WANTED.get(kind) if isinstance(kind, str) else None
    if thinks is None:
        raise invalid_value("thinking.type", f"be one of {', '.join(_WANTED)}", kind)
    if thinking.switch is not None:
        variables = body.get("chat_template_kwargs")
        body["chat_template_kwargs"] = {
            thinking.switch: thinks,
            **(variables if isinstance(variables, dict) else {}),
        }
        return []
    # Without a switch, a model always thinks or never does.
    return [] if thinks == thinking.parses else ["thinking"]


# Variables of chat templates, in `chat_template_kwargs` and beside it. vLLM passes whatever has a
# name that transformers' `apply_chat_template` knows to the tokenizer, `padding` and `max_length`
# among it. Here only variables that the template declares pass.

_VARIABLES = "chat_template_kwargs"
TEMPLATE_FIELDS = frozenset((_VARIABLES, "instruction", "documents"))
_RENDERER_FIELDS = frozenset(
    ("tools", "chat_template", "add_generation_prompt", "continue_final_message", "messages")
)
"""Arguments of the renderer that requests have as fields."""
_KNOWN_SWITCHES = frozenset(
    "enable_thinking thinking thinking_mode thinking_budget reasoning_effort preserve_thinking "
    "clear_thinking drop_thinking".split()
)
"""Variables of well-known templates, which clients set whichever model they talk to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateVariables:
    """Variables of the served model's templates.

    `chat` are those of the chat template, `score` those of the template that joins a query and a
    document. `arguments` are the names of the renderer's and the tokenizer's own arguments.
    """

    chat: frozenset[str] = frozenset()
    score: frozenset[str] = frozenset()
    arguments: frozenset[str] = frozenset()


def filter_variables(
    endpoint: Endpoint,
    body: JsonObject,
    variables: TemplateVariables,
    policy: UnknownPolicy,
    of_request: frozenset[str] | None = None,
) -> list[str]:
    """Leave in `body` the variables that the template declares; return the paths of ignored ones.

    `own` are the variables of a template that the request brings. Raises `UnsupportedFieldError`
    for arguments of the tokenizer and for fields that the template does not show,
    `UnknownFieldError` for names that no template has.
    """
    declared = (
        (variables.score if endpoint.scores else variables.chat)
        if of_request is None
        else of_request - variables.arguments
    )
    # A text of the prompt that the template would leave out.
    name = "instruction" if endpoint.scores else "documents"
    if (endpoint.scores or endpoint.chats) and body.get(name) and name not in declared:
        raise UnsupportedFieldError(
            f"'{name}' is not supported: the template of the served model does not show it.",
            param=name,
        )
    values = body.get(_VARIABLES)
    if not isinstance(values, dict):
        return []
    ignored: list[str] = []
    declared_values: JsonObject = {}
    for name, value in values.items():
        path = f"{_VARIABLES}.{name}"
        if name in declared:
            declared_values[name] = value
        elif name in variables.arguments:
            hint = f"; send the field '{name}'" if name in _RENDERER_FIELDS else ""
            raise UnsupportedFieldError(
                f"'{path}' is not supported: '{name}' is an argument of the tokenizer or the "
                f"renderer, not a variable that the chat template declares{hint}.",
                param=path,
            )
        elif name in _KNOWN_SWITCHES:
            ignored.append(path)
        else:
            refuse_unknown(unknown_field(path, declared), policy)
    body[_VARIABLES] = declared_values
    return ignored
