"""Schemas of tools as they guide an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from server.structured_outputs.grammars import SchemaRules, tag_grammar
from server.structured_outputs.request_constraints import object_schema

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
