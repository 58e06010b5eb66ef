"""Tools: which prompt and parser of calls a model has, which tools a request may call, its schemas.

The default prompt, for templates that show no tools, is Hermes' form in Jinja. Its text goes before
a template. It replaces `messages` by ones that every template can render: tools become part of the
system text, calls text of the assistant, results text of the user. Consecutive results and the
user's words after them are one turn, because some templates require that user and assistant
alternate.
"""

from __future__ import annotations

import json
import logging
import re
from argparse import Namespace
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from server.frontend import LaunchError
from server.settings import ServerSettings
from server.structured_outputs.constraint import object_schema
from server.structured_outputs.grammars import SchemaRules, tag_grammar
from server.tools import ToolChoice, ToolSupport

if TYPE_CHECKING:
    from vllm.config import ModelConfig

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
    found = set[str]()
    for tool in request.tools or ():
        if hasattr(tool, "function"):
            found.add(tool.function.name)
        else:
            found.update(name for name, _ in iter_response_function_tool_info(tool))
    return found


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

    parser_class = ParserManager.get_parser(parser, enable_auto_tools=True)
    calls = None if parser_class is None else parser_class.tool_parser_cls
    if parser_class is None or calls is None:
        return True
    if parser_class.adjust_request is not DelegatingParser.adjust_request:
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


logger = logging.getLogger(__name__)

_NOT_HERMES = ("<arg_key>", "<function=", "<parameter=")
"""Marks of GLM's and Qwen3-Coder's calls, which are between the same tags."""
_HERMES = "hermes"
_HARMONY, _HARMONY_MODEL = "openai", "gpt_oss"
"""vLLM's parser of Harmony, and the model type whose prompts have this form."""
_MARK = "rbln_serve_probe"
_TOOL = {
    "type": "function",
    "function": {
        "name": _MARK,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_USER = {"role": "user", "content": "a"}


def get_tool_parser_name(template: str) -> str | None:
    """Return the name of the parser for the calls of a chat template; None where it is unclear.

    Hermes' form is JSON with a name and arguments between two tags; others have the tags alone.
    """
    hermes = "<tool_call>" in template and re.search(r"""['"]arguments\\?['"]""", template)
    other = any(mark in template for mark in _NOT_HERMES)
    return _HERMES if hermes and not other else None


def template_tokenizer(model_config: ModelConfig, tokenizer: Any) -> Any:
    """Return the tokenizer of a model whose prompts vLLM renders by a Jinja template, else None."""
    from vllm.renderers.hf import HfRenderer
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import tokenizer_args_from_config

    mode, *_ = tokenizer_args_from_config(model_config)
    by_template = issubclass(RENDERER_REGISTRY.load_renderer_cls(mode), HfRenderer)
    return tokenizer if by_template else None


def choose_tools(
    args: Namespace, tokenizer: Any, model_config: ModelConfig, settings: ServerSettings
) -> ToolSupport:
    """Choose the tool prompt and the parser of calls, in vLLM's `args`, where no flag does.

    Sets `chat_template` where the model's own shows no tools. `tokenizer` None: vLLM renders
    prompts without a template.
    """
    if model_config.hf_config.model_type == _HARMONY_MODEL:
        # vLLM renders its prompts and parses its answers itself, and refuses other parsers.
        _choose_parser(args, _HARMONY)
        return ToolSupport("template", args.tool_call_parser, "rendered by vLLM in Harmony's form")
    template = _get_template(args, tokenizer, model_config)
    if template is None:
        return ToolSupport(
            "template", args.tool_call_parser, "rendered by vLLM, without a Jinja template"
        )
    probe = _Probe(template, tokenizer, model_config, args.default_chat_template_kwargs or {})
    if probe.shows_tools():
        _choose_parser(args, get_tool_parser_name(template))
        return ToolSupport("template", args.tool_call_parser, "it names them")
    if not settings.default_tool_prompt:
        reason = "the model's chat template shows no tools, and --no-default-tool-prompt is set"
        return ToolSupport("none", args.tool_call_parser, reason)
    if args.tool_call_parser not in (None, _HERMES):
        reason = (
            "the model's chat template shows no tools, and the default tool prompt needs "
            f"--tool-call-parser {_HERMES}, not {args.tool_call_parser}"
        )
        return ToolSupport("none", args.tool_call_parser, reason)
    args.chat_template_content_format = probe.content_format(args.chat_template_content_format)
    args.chat_template = with_tool_prompt(
        template, system=probe.shows_system(), parts=args.chat_template_content_format == "openai"
    )
    _choose_parser(args, _HERMES)
    return ToolSupport("default", args.tool_call_parser, "the chat template shows no tools")


def check_parsers(args: Namespace, tokenizer: Any, model_config: ModelConfig) -> None:
    """Raise `LaunchError` where a parser does not fit the tokenizer: each answer makes its own."""
    from vllm.parser.parser_manager import ParserManager

    names = {
        "--tool-call-parser": args.tool_call_parser if args.enable_auto_tool_choice else None,
        "--reasoning-parser": args.reasoning_parser
        or args.structured_outputs_config.reasoning_parser
        or None,
    }
    harmony = model_config.hf_config.model_type == _HARMONY_MODEL
    for flag, name in names.items():
        if name is None:
            continue
        of_tools = flag == "--tool-call-parser"
        try:
            parser = ParserManager.get_parser(
                tool_parser_name=name if of_tools else None,
                reasoning_parser_name=None if of_tools else name,
                enable_auto_tools=of_tools,
                model_name=model_config.model,
                is_harmony=harmony,
            )
            if parser is not None:
                parser(tokenizer, None, chat_template_kwargs={}, model_config=model_config)
        except Exception as error:
            # Each parser looks for its tokens in its own way.
            reason = f"it has no token {error}" if isinstance(error, KeyError) else str(error)
            raise LaunchError(
                f"{flag} {name} does not fit the tokenizer of {model_config.model}: {reason}"
            ) from error


def _choose_parser(args: Namespace, name: str | None) -> None:
    if name is not None and args.tool_call_parser is None and not args.enable_auto_tool_choice:
        args.tool_call_parser, args.enable_auto_tool_choice = name, True


def _get_template(args: Namespace, tokenizer: Any, model_config: ModelConfig) -> str | None:
    """Return the Jinja template that vLLM renders requests with tools by; None for none."""
    from vllm.entrypoints.chat_utils import load_chat_template
    from vllm.renderers.hf import resolve_chat_template

    if tokenizer is None:
        return None
    template = resolve_chat_template(
        tokenizer,
        chat_template=load_chat_template(args.chat_template),
        tools=[_TOOL],
        model_config=model_config,
    )
    return template if isinstance(template, str) else None


class _Probe:
    """Renders short conversations by a template."""

    def __init__(
        self, template: str, tokenizer: Any, model_config: ModelConfig, options: dict[str, Any]
    ) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._model_config, self._options = model_config, options
        self._parts = self.content_format("auto") == "openai"

    def shows_tools(self) -> bool:
        """Return whether a tool's name is rendered; True where nothing can be rendered."""
        system = {"role": "system", "content": "a"}
        rendered = [self._render(turns, [_TOOL]) for turns in ([_USER], [system, _USER])]
        texts = [text for text in rendered if text is not None]
        if not texts:
            logger.warning("The chat template cannot be rendered, so that tools are not tried.")
        return not texts or any(_MARK in text for text in texts)

    def shows_system(self) -> bool:
        text = self._render([{"role": "system", "content": _MARK}, _USER], None)
        return text is not None and _MARK in text

    def content_format(self, wanted: Any) -> str:
        """Return vLLM's content format of the template, `openai` or `string`."""
        from vllm.renderers.hf import resolve_chat_template_content_format

        return resolve_chat_template_content_format(
            self._template, None, wanted, self._tokenizer, model_config=self._model_config
        )

    def _render(self, turns: list[Any], tools: list[Any] | None) -> str | None:
        if self._parts:
            turns = [
                {**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns
            ]
        try:
            text = self._tokenizer.apply_chat_template(
                turns,
                tools=tools,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
                **self._options,
            )
        except Exception:
            # A template may refuse a conversation in any way.
            logger.debug("The chat template refuses a conversation", exc_info=True)
            return None
        return str(text)


_MACROS = r"""
{%- macro _tool_prompt() -%}
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{%- for tool in tools %}
    {{- "\n" + (tool | tojson) }}
{%- endfor %}
{{- "\n</tools>\n\nFor each function call, return a json object with function name and " }}
{{- "arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n" }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}' + "\n</tool_call>" }}
{%- endmacro %}
{%- macro _tool_calls(message) -%}
{%- for call in message.tool_calls %}
    {%- set function = call.function or call %}
    {%- set arguments = function.arguments or {} %}
    {{- ("" if loop.first and not message.content else "\n") + "<tool_call>\n" }}
    {{- '{"name": ' + (function.name | tojson) + ', "arguments": ' }}
    {{- (arguments if arguments is string else arguments | tojson) + "}\n</tool_call>" }}
{%- endfor %}
{%- endmacro %}
{%- macro _tool_result(content) -%}
{{- "<tool_response>\n" }}
{{- content or "" if content is string or not content
    else content | selectattr("text") | map(attribute="text") | join("\n") }}
{{- "\n</tool_response>" }}
{%- endmacro %}
"""

_TURNS = r"""
{%- if tools or messages | selectattr("tool_calls") | list
    or messages | selectattr("role", "equalto", "tool") | list %}
    {%- set _to = namespace(prompt=_tool_prompt() if tools else "", results="", turns=[]) %}
    {%- if _to.prompt and SYSTEM and messages[0].role != "system" %}
        {%- set part = {"type": "text", "text": _to.prompt} %}
        {%- set _to.turns = [{"role": "system", "content": [part] if PARTS else part.text}] %}
        {%- set _to.prompt = "" %}
    {%- endif %}
    {%- for message in messages %}
        {%- if message.role == "tool" %}
            {%- set _to.results = _to.results + ("\n" if _to.results else "")
                + _tool_result(message.content) %}
        {%- elif message.role == "user" %}
            {%- set text = [_to.prompt, _to.results] | select | join("\n\n") %}
            {%- set text = text + ("\n\n" if text else "") %}
            {%- if text %}
                {%- set message = dict(message, content=[{"type": "text", "text": text}]
                    + (message.content or []) if PARTS else text + (message.content or "")) %}
            {%- endif %}
            {%- set _to.turns = _to.turns + [message] %}
            {%- set _to.prompt = "" %}
            {%- set _to.results = "" %}
        {%- else %}
            {%- if _to.results %}
                {%- set part = {"type": "text", "text": _to.results} %}
                {%- set _to.turns = _to.turns
                    + [{"role": "user", "content": [part] if PARTS else part.text}] %}
                {%- set _to.results = "" %}
            {%- endif %}
            {%- if message.role == "system" and SYSTEM and _to.prompt %}
                {%- set text = ("\n\n" if message.content else "") + _to.prompt %}
                {%- set message = dict(message, content=(message.content or [])
                    + [{"type": "text", "text": text}] if PARTS
                    else (message.content or "") + text) %}
                {%- set _to.prompt = "" %}
            {%- elif message.tool_calls %}
                {%- set text = _tool_calls(message) %}
                {%- set message = dict(
                    message | items | rejectattr("0", "equalto", "tool_calls"),
                    content=(message.content or []) + [{"type": "text", "text": text}] if PARTS
                    else (message.content or "") + text) %}
            {%- endif %}
            {%- set _to.turns = _to.turns + [message] %}
        {%- endif %}
    {%- endfor %}
    {%- set text = [_to.prompt, _to.results] | select | join("\n\n") %}
    {%- if text %}
        {%- set part = {"type": "text", "text": text} %}
        {%- set _to.turns = _to.turns
            + [{"role": "user", "content": [part] if PARTS else part.text}] %}
    {%- endif %}
    {%- set messages = _to.turns %}
{%- endif %}
"""


def with_tool_prompt(template: str, *, system: bool, parts: bool) -> str:
    """Return the chat template behind the tool prompt.

    `system`: it shows a system message; else the prompt goes before the first words of the user.
    `parts`: it takes contents as lists of parts, as vLLM's content format `openai` has them.
    """
    turns = _TURNS.replace("SYSTEM", json.dumps(system)).replace("PARTS", json.dumps(parts))
    return _MACROS.lstrip() + turns.lstrip() + template
