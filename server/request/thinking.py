"""Fields that switch thinking on and off and set its effort, as the served model supports them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from server.errors import InvalidValueError, describe
from server.request.fields.lookup import effort_path, obeys
from server.wire.endpoint import Endpoint, JsonObject

_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that switch thinking: of Qwen and Granite, of DeepSeek."""
_EFFORT = "reasoning_effort"
_CONTENT = "reasoning_content"
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
        switch = next((name for name in _SWITCHES if name in names), None)
        return cls(switch, harmony or _EFFORT in names, parses)


def settle_thinking(endpoint: Endpoint, body: JsonObject, thinking: ThinkingSupport) -> list[str]:
    """Move a body's thinking fields to the request model's; return the paths without effect.

    Raises `InvalidValueError` for an unknown type of thinking.
    """
    ignored = _settle_switch(body, thinking) if obeys(endpoint, "thinking") else []
    path = effort_path(endpoint)
    effort: object = body if path else None
    for name in path.split("."):
        effort = _get(effort, name)
    # vLLM turns an effort into the switch of that name.
    has_effect = thinking.effort or thinking.switch == "enable_thinking"
    return ignored if effort is None or has_effect else [*ignored, path]


def settle_reasoning(body: JsonObject) -> None:
    """Rename `reasoning_content` of messages, which many clients send, to vLLM's `reasoning`."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and (said := message.pop(_CONTENT, None)) is not None:
            message.setdefault("reasoning", said)


def _settle_switch(body: JsonObject, thinking: ThinkingSupport) -> list[str]:
    given = body.pop("thinking", None)
    if given is None:
        return []
    kind = _get(given, "type")
    wanted = _WANTED.get(kind) if isinstance(kind, str) else None
    if wanted is None:
        raise InvalidValueError(
            f"'thinking.type' must be one of {', '.join(_WANTED)}, got {describe(kind)}.",
            param="thinking.type",
        )
    if thinking.switch is not None:
        own = body.get("chat_template_kwargs")
        body["chat_template_kwargs"] = {
            thinking.switch: wanted,
            **(own if isinstance(own, dict) else {}),
        }
        return []
    # Without a switch, a model always thinks or never does.
    return [] if wanted == thinking.parses else ["thinking"]


def _get(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, dict) else None
