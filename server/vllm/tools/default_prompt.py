"""The tool prompt of chat templates that show no tools: Hermes' form, in Jinja.

The text goes before a template. It replaces `messages` by ones that every template can render:
tools become part of the system text, calls text of the assistant, results text of the user.
Consecutive results and the user's words after them are one turn, because some templates require
that user and assistant alternate.
"""

from __future__ import annotations

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
    turns = _TURNS.replace("SYSTEM", _literal(system)).replace("PARTS", _literal(parts))
    return _MACROS.lstrip() + turns.lstrip() + template


def _literal(value: bool) -> str:
    return "true" if value else "false"
