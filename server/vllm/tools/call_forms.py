"""The forms in which models write tool calls as JSON, by vLLM's parser of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import regex


@dataclass(frozen=True)
class CallForm:
    """What is around the JSON objects of calls.

    `begin` and `after` are patterns: of what comes before a call, with the object's brace, and of
    what follows an object, with the brace of a next call or else the end of the calls. A group
    `name` of `begin` is the tool's name, and the object then is the arguments; a group `hidden` is
    a mark that is no text of the answer. `keyed`: the name is the object's only key. `tag`: name
    of the tags, where vLLM's grammar of calls has `tool_call`.
    """

    begin: Any
    after: Any
    keyed: bool = False
    tag: str | None = None


def _form(begin: str, after: str = "", **more: Any) -> CallForm:
    return CallForm(regex.compile(begin + r"\s*\{"), regex.compile(r"\s*" + after), **more)


def _listed(begin: str, end: str = "", **more: Any) -> CallForm:
    """Return the form of objects in a list."""
    return _form(begin + r"\s*\[", rf"(?:,\s*\{{|\]\s*{end})", **more)


_HERMES = _form("<tool_call>", "</tool_call>")
FORMS = {
    "Hermes2ProToolParser": _HERMES,
    "Granite4ToolParser": _HERMES,
    "Ernie45ToolParser": CallForm(
        regex.compile(
            r"(?P<hidden>\n*</?response>|(?:\A|(?<=</?response>))\n+(?=[^\n]))"
            r"|\n*<tool_call>\s*\{"
        ),
        _HERMES.after,
    ),
    "LongcatFlashToolParser": _form(
        "<longcat_tool_call>", "</longcat_tool_call>", tag="longcat_tool_call"
    ),
    "Granite20bFCToolParser": _form("<function_call>"),
    "GraniteToolParser": _listed(r"\A\s*(?:<\|tool_call\|>)?\s*(?:<tool_call>)?"),
    "Phi4MiniJsonToolParser": _listed("functools"),
    "JambaToolParser": _listed("<tool_calls>", "</tool_calls>"),
    "HunyuanA13BToolParser": _listed("<tool_calls>", "</tool_calls>"),
    "xLAMToolParser": _listed(
        r"(?:\A|</think>|```(?:json)?|\[TOOL_CALLS\]|<tool_call>)", "(?:```|</tool_call>)?"
    ),
    "Llama3JsonToolParser": _form(r"(?:<\|python_tag\|>)?", r";\s*\{"),
    "Internlm2ToolParser": _form(r"<\|action_start\|>\s*<\|plugin\|>", r"<\|action_end\|>"),
    "GigaChat3ToolParser": _form(
        r"(?:<\|message_sep\|>\s*)?(?:function call<\|role_sep\|>\n|<\|function_call\|>)", "</s>"
    ),
    "ApertusToolParser": _listed(r"<\|tools_prefix\|>", r"<\|tools_suffix\|>", keyed=True),
    "DeepSeekV3ToolParser": _form(
        "(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>[^<\n]*<｜tool▁sep｜>(?P<name>[^\n]*)\n```json\n",
        "```<｜tool▁call▁end｜>",
    ),
    "DeepSeekV31ToolParser": _form(
        "(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?P<name>[^<]*)<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
    ),
}
"""The forms of the classes in `vllm.tool_parsers`, by their names."""

LISTED, ARGUMENTS = _listed(r"\A"), _form(r"\A")
"""vLLM's schemas of calls that a request demands: a list of calls, and arguments of one tool."""
