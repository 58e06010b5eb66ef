"""vLLM's requests, adapted to the tools that an answer may call."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from server.tools.choice import ToolChoice
from server.vllm.tools.schemas import guiding

_NAMES = "allowed_tool_names"
_HIDES_END = "hides_end_token"
_CALLS = frozenset(("tags_with_separator", "triggered_tags"))
"""Formats of a structural tag that hold any number of calls."""


def allow_names(request: Any, choice: ToolChoice) -> None:
    """Note at a request of vLLM's which tools its answer may call."""
    setattr(request, _NAMES, sorted(choice.names or ()))


def allowed_names(request: Any) -> Collection[str] | None:
    """Return the names of the tools that an answer may call; None for all."""
    names: Collection[str] | None = getattr(request, _NAMES, None)
    return names


def callable_names(request: Any) -> Collection[str]:
    """Return the names of the tools that an answer may call."""
    from vllm.tool_parsers.utils import iter_response_function_tool_info

    names = allowed_names(request)
    if names is not None:
        return names
    return {
        name
        for tool in request.tools or ()
        for name in (
            [tool.function.name]
            if hasattr(tool, "function")
            else [one for one, _ in iter_response_function_tool_info(tool)]
        )
    }


def chosen_name(choice: Any) -> str | None:
    """Return the name of the tool that a choice of vLLM's requests names, None for none."""
    name: str | None = getattr(getattr(choice, "function", choice), "name", None)
    return name


def continued_text(request: Any) -> str:
    """Return the text of the message that an answer continues, empty where it begins its own."""
    from vllm.entrypoints.openai.responses.utils import should_continue_final_message

    if getattr(request, "continue_final_message", False):
        last = request.messages[-1]
    elif hasattr(request, "input") and should_continue_final_message(request.input):
        last = request.input[-1]
    else:
        return ""
    content = last.get("content") if isinstance(last, dict) else getattr(last, "content", None)
    if content is None or isinstance(content, str):
        return content or ""
    parts = (part if isinstance(part, dict) else part.model_dump() for part in content)
    return "\n".join(part.get("text") or "" for part in parts)


def hide_end_token(request: Any) -> None:
    """Note at a request that special tokens are shown for the sake of calls alone.

    The one that ends the answer is then not shown as the text of a stop string.
    """
    setattr(request, _HIDES_END, request.include_stop_str_in_output)


def hides_end_token(request: Any) -> bool:
    """Return whether the special token that ends an answer is to be hidden."""
    return bool(getattr(request, _HIDES_END, False))


def plain_choice(request: Any) -> Any:
    """Return `tool_choice` as vLLM's parsers know it: a list of tools is its mode."""
    choice = request.tool_choice
    listed = allowed_names(request) is not None and not isinstance(choice, str)
    return choice.mode if listed else choice


def demands_answer(request: Any) -> bool:
    """Return whether an answer must have a call, or a text of a given form."""
    if request.tools and plain_choice(request) not in (None, "auto", "none"):
        return True
    guide = request.structured_outputs
    if guide is not None and not (request.tools and guide.structural_tag is not None):
        return True
    text = getattr(request, "text", None)
    form = getattr(request, "response_format", None) or getattr(text, "format", None)
    return form is not None and form.type != "text"


def guiding_tools(request: Any) -> list[Any]:
    """Return those tools of a request that guide its answer."""
    names = allowed_names(request)
    if names is None:
        return [guiding(tool) for tool in request.tools]
    allowed = [tool for tool in request.tools if _name(tool) in names]
    return [guiding(tool, strict=True) for tool in allowed]


def _name(tool: Any) -> str | None:
    name: str | None = getattr(getattr(tool, "function", tool), "name", None)
    return name


def allow_one_call(request: Any) -> None:
    """Let the grammar of a request's calls end after the first one, in place."""
    guide = getattr(request, "structured_outputs", None)
    if guide is not None and guide.structural_tag is not None:
        tag = json.loads(guide.structural_tag)
        _stop_after_first(tag)
        request.structured_outputs = replace(guide, structural_tag=json.dumps(tag))


def _stop_after_first(value: Any) -> None:
    if isinstance(value, dict):
        if value.get("type") in _CALLS:
            value["stop_after_first"] = True
            return
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        _stop_after_first(item)
