"""vLLM's parsers of answers, held to what a call of a tool is: a name and an object.

A call that the request demands is guided by the tool's schema, `strict` or not: vLLM and xgrammar
take a tool that is not strict for one whose arguments may be any JSON. Where nothing guides the
answer, what looks like a call without an object is text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from server.vllm.streams.text_chunks import TextDelta

if TYPE_CHECKING:
    from vllm.parser import Parser

_NOT_HERMES = ("<arg_key>", "<function=", "<parameter=")
"""What GLM's and Qwen3-Coder's calls have between the same tags."""
_SAID = frozenset(("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"))
"""Keys of a schema that say what a value is."""


@cache
def with_object_calls(parser: type[Parser] | None) -> type[Parser] | None:
    """Return the parser whose calls have objects for arguments; None for none."""
    return None if parser is None else type(parser.__name__, (_ObjectCalls, parser), {})


def object_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object whatever it leaves out."""
    given = dict(parameters or {})
    if isinstance(given.get("type"), list):
        return {**given, "type": "object"}
    return given if _SAID & given.keys() else {"type": "object", **given}


def tool_parser_of(template: str) -> str | None:
    """Return the parser of the calls that a chat template writes, where it shows beyond doubt.

    Hermes' form is JSON with a name and arguments between two tags; others have the tags alone.
    """
    hermes = "<tool_call>" in template and re.search(r"""['"]arguments\\?['"]""", template)
    other = any(mark in template for mark in _NOT_HERMES)
    return "hermes" if hermes and not other else None


class _ObjectCalls:
    """Mixed into a class of vLLM's parsers, of which there is one for each answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls: dict[int, list[Any] | None] = {}
        self._texts: list[str] = []
        self._sent = 0
        self._any_call = False
        # Without tools or thinking there is nothing to parse, and text is told the short way.
        self._only_text = self.reasoning_parser is None and not self._engine_based  # type: ignore[attr-defined]

    def adjust_request(self, request: Any) -> Any:
        """Add to a request what guides its answer; its tools stay as they were given."""
        given = request.tools
        if given:
            request.tools = [_guiding(tool) for tool in given]
        adjusted = super().adjust_request(request)  # type: ignore[misc]
        adjusted.tools = given
        return adjusted

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, list[Any] | None]:
        """Return thinking, text and calls of a whole answer."""
        reasoning, content, calls = super().parse(  # type: ignore[misc]
            model_output, request, enable_auto_tools, model_output_token_ids
        )
        kept = [call for call in calls or () if _begins_object(call.arguments)]
        if calls and not kept:
            # None of it was a call, so that all of it is text.
            content = self._content(model_output, request)
        return reasoning, content, kept if calls else calls

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> Any:
        """Return what of an answer can be told after one more piece of it."""
        if not request.tools and self._only_text:
            return TextDelta(delta_text) if delta_text else None
        delta = super().parse_delta(  # type: ignore[misc]
            delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
        )
        self._texts.append(delta_text)
        if delta is not None and delta.tool_calls:
            delta.tool_calls = [piece for call in delta.tool_calls for piece in self._told(call)]
        if finished and self._calls and not self._any_call:
            delta = self._with_the_rest(delta, request)
        if delta is None:
            return None
        self._sent += len(delta.content or "")
        return delta if delta.tool_calls or delta.content or delta.reasoning else None

    def _told(self, call: Any) -> list[Any]:
        """Return what can be told of a call: nothing before its arguments begin as an object."""
        held = self._calls.setdefault(call.index, [])
        if held is None:
            return [call]
        held.append(call)
        text = "".join(piece.function.arguments or "" for piece in held if piece.function)
        if not _begins_object(text):
            return []
        self._calls[call.index] = None
        self._any_call = True
        # As one piece, as clients expect it: the first has the name.
        first = next(piece for piece in held if piece.function)
        first.function.arguments = text
        return [first]

    def _with_the_rest(self, delta: Any, request: Any) -> Any:
        """Return the last delta with all of the text that was held back for a call."""
        from vllm.entrypoints.generate.base.protocol import DeltaMessage

        content = self._content("".join(self._texts), request) or ""
        delta = DeltaMessage() if delta is None else delta
        delta.content = content[self._sent :]
        return delta

    def _content(self, text: str, request: Any) -> str | None:
        content: str | None = self.extract_reasoning(text, request)[1]  # type: ignore[attr-defined]
        return content


def _begins_object(text: str) -> bool:
    return text.lstrip().startswith("{")


def _guiding(tool: Any) -> Any:
    """Return a copy of a tool whose schema is one of objects, and which is not less than guided."""
    function = getattr(tool, "function", tool)
    if not hasattr(function, "parameters"):
        return tool
    changes: dict[str, Any] = {"parameters": object_schema(function.parameters)}
    if function.strict is False:
        changes["strict"] = None
    changed = function.model_copy(update=changes)
    return changed if function is tool else tool.model_copy(update={"function": changed})
