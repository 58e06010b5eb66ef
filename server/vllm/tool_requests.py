"""vLLM's requests with tools: which of them an answer may call, and the schemas that guide it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from server.structured_outputs.constraint import object_schema
from server.structured_outputs.grammars import SchemaRules, tag_grammar
from server.tools import ToolChoice

_NAMES = "allowed_tool_names"
_HIDES_END = "hides_end_token"
_CALLS = frozenset(("tags_with_separator", "triggered_tags"))
"""Formats of a structural tag that hold any number of calls."""


def allow_names(request: Any, choice: ToolChoice) -> None:
    """Note at a request of vLLM's which tools its answer may call."""
    setattr(request, _NAMES, sorted(choice.names or ()))


def allowed_names(request: Any) -> Collection[str] | None:
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


def tool_name(tool: Any) -> str | None:
    """Return the name of a tool, or the one that a choice of vLLM's requests names, if any."""
    name: str | None = getattr(getattr(tool, "function", tool), "name", None)
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
    return [guiding(tool, strict=True) for tool in request.tools if tool_name(tool) in names]


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


_RULES = SchemaRules(compact=True, closed=True)


def rewrites_arguments(parser: str | None) -> bool:
    """Return True if vLLM's grammars of a parser's calls have only schemas that are rewritten.

    vLLM makes a structural tag or, for other parsers, a JSON schema of a request's tools.
    """
    from vllm.parser.abstract_parser import DelegatingParser
    from vllm.parser.parser_manager import ParserManager

    found = ParserManager.get_parser(parser, enable_auto_tools=True)
    calls = None if found is None else found.tool_parser_cls
    if found is None or calls is None:
        return True
    if found.adjust_request is not DelegatingParser.adjust_request:
        return False
    if calls.structural_tag_model is None:
        return bool(calls.supports_required_and_named)
    return all(
        tag_grammar(tag, {}, _RULES) is not None
        for tag in _example_tags(calls.structural_tag_model)
    )


def _example_tags(model: str) -> Iterator[Any]:
    """Yield a structural tag for each `tool_choice`; None if vLLM makes none for the model."""
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionNamedToolChoiceParam,
        ChatCompletionToolsParam,
    )
    from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag

    named, arguments = {"name": "a"}, {"type": "object", "properties": {"b": {"type": "integer"}}}
    tool = ChatCompletionToolsParam(function={**named, "parameters": arguments, "strict": True})
    for choice in ("auto", "required", ChatCompletionNamedToolChoiceParam(function=named)):
        try:
            tag = get_model_structural_tag(model, [tool], choice, reasoning=False)
        except ValueError:
            tag = None
        yield None if tag is None else tag.model_dump()


def guiding(tool: Any, *, strict: bool = False) -> Any:
    """Return a copy of a tool whose schema is one of objects and is always followed.

    vLLM and xgrammar allow any JSON as arguments of a tool with `strict: false`. `strict` guides
    calls of a free choice as well.
    """
    function = getattr(tool, "function", tool)
    if not hasattr(function, "parameters"):
        return tool
    changes: dict[str, Any] = {"parameters": object_schema(function.parameters)}
    if strict:
        changes["strict"] = True
    elif function.strict is False:
        changes["strict"] = None
    changed = function.model_copy(update=changes)
    return changed if function is tool else tool.model_copy(update={"function": changed})
