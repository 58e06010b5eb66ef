"""vLLM's parsers of tool calls, where calls are JSON: read by `CallReader`, whole and streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from server.errors import InvalidValueError
from server.vllm.tools.call_forms import ARGUMENTS, FORMS, LISTED, CallForm
from server.vllm.tools.call_reader import CallReader, Found
from server.vllm.tools.requests import callable_names, chosen_name, continued_text

if TYPE_CHECKING:
    from vllm.tool_parsers import ToolParser


def json_call_parser(parser: type[ToolParser] | None) -> type[ToolParser] | None:
    """Return the subclass that reads calls from their JSON; parsers of other forms stay.

    What a schema of vLLM's guides, where its parser has no grammar of calls, is JSON for each.
    """
    if parser is None:
        return None
    ours = parser.__module__.startswith("vllm.tool_parsers.")
    form, listed = FORMS.get(parser.__name__) if ours else None, parser.supports_required_and_named
    if form is None and not listed:
        return parser
    fields = {"form": form, "listed": listed, "supports_required_and_named": False}
    return type(parser.__name__, (JsonCalls, parser), fields)


class JsonCalls:
    """Mixed into a class of vLLM's tool parsers, of which there is one for each answer.

    `form`: of its calls, None if they are no JSON. `listed`: calls that a request demands have the
    form of vLLM's schema.
    """

    form: CallForm | None
    listed: bool
    _reader: CallReader | None = None

    def reader(self, request: Any) -> CallReader | None:
        """Return a reader for an answer; None if vLLM's parser reads it."""
        choice = request.tool_choice
        guided, name = choice not in (None, "auto"), chosen_name(choice)
        form = self.form
        if guided and self.listed:
            form = LISTED if name is None else ARGUMENTS
        if form is None or choice == "none":
            return None
        name = name if form is ARGUMENTS else None
        made = CallReader(form, callable_names(request), guided=guided, name=name)
        made.continue_from(continued_text(request))
        return made

    def refuse_open_calls(self, request: Any, *, guided: bool) -> None:
        """Raise `InvalidValueError` where a grammar of calls would begin inside of a call.

        `guided`: the answer to a request has such a grammar.
        """
        reader = self.reader(request) if guided else None
        if reader is None or not reader.is_within_call:
            return
        if request.tool_choice in (None, "auto"):
            raise InvalidValueError(
                "'tools' has a tool with 'strict', whose schema cannot guide the rest of a call, "
                "and the message that the answer continues ends inside of one; set 'strict' to "
                "false.",
                param="tools",
            )
        raise InvalidValueError(
            "'tool_choice' demands a call, and the message that the answer continues ends inside "
            "of one; the rest of a call is returned with 'tool_choice': 'auto'.",
            param="tool_choice",
        )

    def get_structural_tag(self, request: Any, *, reasoning: bool = False) -> Any:
        """Return vLLM's grammar of calls, with the tags of this form."""
        tag: Any = super().get_structural_tag(request, reasoning=reasoning)  # type: ignore[misc]
        if tag is not None and self.form is not None and self.form.tag is not None:
            own = f"{self.form.tag}>"
            for one in getattr(tag.format, "tags", ()):
                one.begin = one.begin.replace("tool_call>", own, 1)
                one.end = one.end.replace("tool_call>", own, 1)
            if hasattr(tag.format, "triggers"):
                tag.format.triggers = [
                    one.replace("tool_call>", own) for one in tag.format.triggers
                ]
        return tag

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """Return the text and the calls of a whole answer."""
        from vllm.entrypoints.generate.base.protocol import (
            ExtractedToolCallInformation,
            FunctionCall,
            ToolCall,
        )

        reader = self.reader(request)
        if reader is None:
            return super().extract_tool_calls(model_output, request)  # type: ignore[misc]
        parts = [reader.read(model_output), reader.finish(cut=False)]
        calls = [
            ToolCall(function=FunctionCall(name=name, arguments=part.arguments[index]))
            for part in parts
            for index, name in part.names.items()
        ]
        return ExtractedToolCallInformation(
            tools_called=bool(calls),
            tool_calls=calls,
            content="".join(part.text for part in parts) or None,
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Any,
        current_token_ids: Any,
        delta_token_ids: Any,
        request: Any,
    ) -> Any:
        """Return what a further piece of an answer adds."""
        if self._reader is None:
            self._reader = self.reader(request)
        if self._reader is None:
            return super().extract_tool_calls_streaming(  # type: ignore[misc]
                previous_text,
                current_text,
                delta_text,
                previous_token_ids,
                current_token_ids,
                delta_token_ids,
                request,
            )
        return _delta(self._reader.read(delta_text))

    def finish(self, *, cut: bool) -> Any:
        """Return the rest of a streamed answer; None for none."""
        return None if self._reader is None else _delta(self._reader.finish(cut=cut))


def _delta(found: Found) -> Any:
    from vllm.entrypoints.chat_utils import make_tool_call_id
    from vllm.entrypoints.generate.base.protocol import (
        DeltaFunctionCall,
        DeltaMessage,
        DeltaToolCall,
    )

    calls = [
        DeltaToolCall(
            index=index,
            type="function",
            id=make_tool_call_id(),
            function=DeltaFunctionCall(name=found.names[index], arguments=arguments),
        )
        if index in found.names
        else DeltaToolCall(index=index, function=DeltaFunctionCall(arguments=arguments))
        for index, arguments in found.arguments.items()
    ]
    if not calls and not found.text:
        return None
    return DeltaMessage(content=found.text or None, tool_calls=calls)
