"""vLLM's parsers of answers, held to what a tool call is: a name and an object.

A call that the request demands is guided by the tool's schema, `strict` or not. Where nothing
guides the answer, what looks like a call without an object is text. Calls that are JSON are read by
`CallReader`, whole and streamed.

An answer that was cut (`Ending.is_cut`) keeps its last call as far as it was generated. vLLM's
parsers would complete it, or return its markup as text. A whole answer that was cut is therefore
parsed as its stream would have been, and the stream is never closed.

Reasoning that goes by markers is read before (`rbln_backend.grammar.reasoning`), whole or streamed,
and vLLM's parsers have the answer behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from vllm.entrypoints.chat_utils import make_tool_call_id
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.parser import Parser
from vllm.reasoning import ReasoningParser
from vllm.tokenizers.detokenizer_utils import convert_prompt_ids_to_tokens, detokenize_incrementally
from vllm.tool_parsers import ToolParser

from rbln_backend import api
from server.errors import InvalidValueError
from server.tools import NATURAL, Ending
from server.vllm.call_reader import ARGUMENTS, FORMS, LISTED, CallForm, CallReader, Found
from server.vllm.text_stream import TextDelta
from server.vllm.tools import (
    allow_one_call,
    callable_names,
    continued_text,
    guiding_tools,
    hide_end_token,
    hides_end_token,
    plain_choice,
    tool_name,
)


def json_call_parser(parser: type[ToolParser] | None) -> type[ToolParser] | None:
    """Return the subclass that reads calls from their JSON; parsers of other forms stay.

    What a schema of vLLM's guides, where its parser has no grammar of calls, is JSON for each.
    """
    if parser is None:
        return None
    is_vllms = parser.__module__.startswith("vllm.tool_parsers.")
    form, listed = (
        FORMS.get(parser.__name__) if is_vllms else None,
        parser.supports_required_and_named,
    )
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
        guided, name = choice not in (None, "auto"), tool_name(choice)
        form = self.form
        if guided and self.listed:
            form = LISTED if name is None else ARGUMENTS
        if form is None or choice == "none":
            return None
        name = name if form is ARGUMENTS else None
        reader = CallReader(form, callable_names(request), guided=guided, name=name)
        reader.continue_from(continued_text(request))
        return reader

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
            tag_end = f"{self.form.tag}>"
            for one in getattr(tag.format, "tags", ()):
                one.begin = one.begin.replace("tool_call>", tag_end, 1)
                one.end = one.end.replace("tool_call>", tag_end, 1)
            if hasattr(tag.format, "triggers"):
                tag.format.triggers = [
                    one.replace("tool_call>", tag_end) for one in tag.format.triggers
                ]
        return tag

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """Return the text and the calls of a whole answer."""
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

    def extract_tool_calls_streaming(self, *args: Any) -> Any:
        """Return what a further piece of an answer adds; the arguments are vLLM's."""
        _, _, delta_text, *_, request = args
        if self._reader is None:
            self._reader = self.reader(request)
        if self._reader is None:
            return super().extract_tool_calls_streaming(*args)  # type: ignore[misc]
        return _delta(self._reader.read(delta_text))

    def finish(self, *, cut: bool) -> Any:
        return None if self._reader is None else _delta(self._reader.finish(cut=cut))


def _delta(found: Found) -> Any:
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


class ParsedAnswer:
    """Accumulates the deltas of one stream."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.content = ""
        self._calls: dict[int, FunctionCall] = {}

    def add(self, delta: Any) -> None:
        self.reasoning += delta.reasoning or ""
        self.content += delta.content or ""
        for piece in delta.tool_calls or ():
            function = piece.function
            if piece.index not in self._calls:
                call = FunctionCall(id=piece.id, name=function.name, arguments="")
                self._calls[piece.index] = call
            self._calls[piece.index].arguments += function.arguments or ""

    @property
    def calls(self) -> list[FunctionCall]:
        """Tool calls in the order in which they began."""
        return list(self._calls.values())

    def parts(self) -> tuple[str | None, str | None, list[Any]]:
        """Return reasoning, text and tool calls as `Parser.parse` does."""
        return self.reasoning or None, self.content or None, self.calls


MAX_PIECES = 512
"""Most pieces of one answer; longer answers have more tokens in a piece.

Some of vLLM's parsers read all earlier text again for each piece.
"""


def get_pieces(
    tokenizer: Any,
    text: str,
    token_ids: Sequence[int],
    prompt_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
) -> list[tuple[str, list[int]]]:
    """Return the text and the tokens of each piece; the texts together are `text`.

    `text` may end before its last tokens do, at a stop string.
    """
    step = -(-len(token_ids) // MAX_PIECES) or 1
    lengths = _lengths(tokenizer, token_ids, prompt_ids, skip_special_tokens)
    pieces: list[tuple[str, list[int]]] = []
    start = end = 0
    for at in range(0, len(token_ids), step):
        chunk = list(token_ids[at : at + step])
        end += sum(next(lengths) for _ in chunk)
        last = at + step >= len(token_ids)
        pieces.append((text[start : None if last else end], chunk))
        start = end
    return pieces or [(text, [])]


def _lengths(
    tokenizer: Any, token_ids: Sequence[int], prompt_ids: Sequence[int], skip_special_tokens: bool
) -> Iterator[int]:
    """Yield the number of characters that each token adds to the text."""
    tokens, prefix, read = convert_prompt_ids_to_tokens(
        tokenizer, list(prompt_ids), skip_special_tokens
    )
    for token in token_ids:
        new, text, prefix, read = detokenize_incrementally(
            tokenizer, [token], tokens, prefix, read, skip_special_tokens
        )
        tokens = [*tokens[prefix:], *new]
        prefix, read = 0, read - prefix
        yield len(text)


Parts = tuple[str | None, str | None, list[Any] | None]
"""Reasoning, text and tool calls."""


@cache
def object_call_parser(parser: type[Parser] | None) -> type[Parser] | None:
    """Return the subclass whose calls have objects for arguments; None for none."""
    if parser is None:
        return None
    fields = {
        "tool_parser_cls": json_call_parser(parser.tool_parser_cls),
        "reasoning_parser_cls": api.marked_reasoning(parser.reasoning_parser_cls),
    }
    return type(parser.__name__, (ObjectCallParser, parser), fields)


class ObjectCallParser:
    """Mixed into a class of vLLM's parsers, of which there is one for each answer."""

    _reasoning_parser: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arguments = args, kwargs
        # The parser of reasoning by markers, which vLLM's class then has not; else None.
        self._marked: Any = None
        if hasattr(self._reasoning_parser, "reader"):
            self._marked, self._reasoning_parser = self._reasoning_parser, None
            if hasattr(self._tool_parser, "skip_reasoning_parsing"):  # type: ignore[attr-defined]
                self._tool_parser.skip_reasoning_parsing = True  # type: ignore[attr-defined]
        self._reading: Any = None
        self._prompt_ids: Sequence[int] = ()
        self._behind: list[int] = []
        self._answers = False
        self.ending = NATURAL
        """Ending of the answer, to be set before its last delta is parsed."""
        self.streamed: ParsedAnswer | None = None
        """The deltas that `parse_delta` has returned."""
        self._whole: deque[Parts] = deque()
        self._held: dict[int, list[Any] | None] = {}
        self._plain_request: Any = None
        self._text = ""
        self._space = ""
        # Without tools or reasoning there is nothing to parse.
        self._only_text = self.reasoning_parser is None and not self._engine_based  # type: ignore[attr-defined]

    @property
    def reasoning_parser(self) -> ReasoningParser | None:
        parser: ReasoningParser | None = self._marked or self._reasoning_parser
        return parser

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        """Return whether the answer to a prompt begins without reasoning."""
        marked = self._marked
        ended = super().is_reasoning_end if marked is None else marked.is_reasoning_end  # type: ignore[misc]
        return bool(ended(input_ids))

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Return the number of reasoning tokens of an answer: the one that is streamed, or any."""
        if self._marked is None:
            return int(super().count_reasoning_tokens(token_ids))  # type: ignore[misc]
        if self._reading is not None:
            return int(self._reading.tokens)
        return int(self._marked.span(token_ids, self._prompt_ids)[0])

    def is_thinking_behind(self, output: Any, request: Any, prompt_ids: Sequence[int]) -> bool:
        """Return whether the reasoning is open if this CompletionOutput of vLLM is the last."""
        if self._marked is None:
            return False
        reading = self._reading or self._marked.reading(prompt_ids, request)
        return bool(reading.thinks_behind(output.text, output.token_ids))

    def adjust_request(self, request: Any) -> Any:
        """Add the constraints of an answer to its request; its tools stay as they were given."""
        tools, choice = request.tools, request.tool_choice
        if tools:
            request.tools, request.tool_choice = guiding_tools(request), plain_choice(request)
        skips, guide = request.skip_special_tokens, request.structured_outputs
        adjusted = super().adjust_request(request)  # type: ignore[misc]
        if tools and isinstance(self.tool_parser, JsonCalls):  # type: ignore[attr-defined]
            guided = adjusted.structured_outputs is not guide or adjusted.tool_choice != "auto"
            self.tool_parser.refuse_open_calls(adjusted, guided=guided)  # type: ignore[attr-defined]
        if skips and not adjusted.skip_special_tokens:
            hide_end_token(adjusted)
        adjusted.tools, adjusted.tool_choice = tools, choice
        if tools and adjusted.parallel_tool_calls is False:
            allow_one_call(adjusted)
        return adjusted

    def read_whole(
        self, output: Any, request: Any, prompt_token_ids: Sequence[int], *, auto_tools: bool
    ) -> None:
        """Parse a complete answer in advance; `parse` returns the results in the same order.

        `output` is a vLLM CompletionOutput. One that was cut takes up to some 100 ms.
        """
        self._prompt_ids = prompt_token_ids
        ending = Ending.of(output, request)
        self._whole.append(
            self._read(output.text, request, auto_tools, output.token_ids, prompt_token_ids, ending)
        )

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> Parts:
        """Return reasoning, text and calls of a whole answer, or of one that was streamed."""
        if self.streamed is not None:
            return self.streamed.parts()
        if self._whole:
            return self._whole.popleft()
        return self._read(model_output, request, enable_auto_tools, model_output_token_ids)

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> Any:
        """Return what can be sent of an answer after one more piece of it."""
        if not request.tools and self._only_text:
            return TextDelta(delta_text) if delta_text else None
        request = self._plain(request)
        ending = self.ending if finished else None
        delta_text = self._without_end(delta_text, delta_token_ids, request, ending)
        calling = self._may_call(request)
        cut = finished and calling and self.ending.is_cut
        piece: Any = delta_text, delta_token_ids, request, prompt_token_ids
        delta = None
        if self._marked is not None:
            delta, piece = self._read_piece(*piece, finished=finished)
        if piece is not None:
            parsed = super().parse_delta(*piece, finished=finished and not cut)  # type: ignore[misc]
            delta = parsed if delta is None else _with_reasoning(parsed, delta.reasoning)
            self._text += piece[0]
        if finished and calling and isinstance(self.tool_parser, JsonCalls):  # type: ignore[attr-defined]
            delta = _joined(delta, self.tool_parser.finish(cut=cut))  # type: ignore[attr-defined]
        if self.streamed is None:
            self.streamed = ParsedAnswer()
        if delta is not None and delta.tool_calls:
            delta.tool_calls = [
                piece for call in delta.tool_calls for piece in self._sent(call, request)
            ]
        if calling:
            delta = self._without_trailing_space(delta, finished=finished)
            if finished and not cut and not self.streamed.calls and self._held:
                delta = self._with_the_rest(delta, request)
        if delta is not None and (delta.tool_calls or delta.content or delta.reasoning):
            self.streamed.add(delta)
            return delta
        # A chunk without text still carries its tokens' logprobs.
        return DeltaMessage() if getattr(request, "logprobs", None) else None

    def _read_piece(
        self,
        text: str,
        token_ids: Sequence[int],
        request: Any,
        prompt_ids: Sequence[int] | None,
        *,
        finished: bool,
    ) -> tuple[Any, Any]:
        """Return a delta of reasoning, if any, and what is parsed of the answer, from its text on.

        The latter are arguments of vLLM's `parse_delta`.
        """
        if self._reading is None:
            self._reading = self._marked.reading(prompt_ids or (), request)
        thought, text, token_ids = self._reading.read(text, token_ids, finished=finished)
        self._behind += token_ids
        piece: Any = None
        if text or self._answers:
            piece = text, self._behind, request, []
            self._answers, self._behind = True, []
        shown = thought and request.include_reasoning
        return _with_reasoning(None, thought) if shown else None, piece

    def _sent(self, call: Any, request: Any) -> list[Any]:
        """Return the pieces of a call to send: none before its arguments begin as an object."""
        pieces = self._held.setdefault(call.index, [])
        if pieces is None:
            return [call]
        pieces.append(call)
        name = next((one.function.name for one in pieces if one.function), None)
        text = "".join(piece.function.arguments or "" for piece in pieces if piece.function)
        if not self._is_call(name, text, request):
            return []
        if request.parallel_tool_calls is False and None in self._held.values():
            return []
        self._held[call.index] = None
        # As one piece, as clients expect it: the first has the name.
        first = next(piece for piece in pieces if piece.function)
        first.function.arguments = text
        return [first]

    def _without_trailing_space(self, delta: Any, *, finished: bool) -> Any:
        """Hold trailing whitespace back until text follows; at the end, calls replace it."""
        if delta is None and not finished:
            return None
        delta = DeltaMessage() if delta is None else delta
        content = self._space + (delta.content or "")
        text = content.rstrip()
        self._space = content[len(text) :]
        assert self.streamed is not None
        if finished and not (self.streamed.calls or delta.tool_calls):
            text = content
        delta.content = text or None
        return delta

    def _with_the_rest(self, delta: Any, request: Any) -> Any:
        """Return the last delta with all text that was held back for a call that never came."""
        assert self.streamed is not None
        delta = DeltaMessage() if delta is None else delta
        sent = self.streamed.content + (delta.content or "")
        content = self._content(self._text, request) or ""
        if not delta.tool_calls and content.startswith(sent):
            delta.content = (delta.content or "") + content[len(sent) :]
        return delta

    def _read(
        self,
        text: str,
        request: Any,
        auto_tools: bool,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int] = (),
        ending: Ending = NATURAL,
    ) -> Parts:
        request = self._plain(request)
        if self._may_call(request) and (ending.is_cut or self._takes_any_pieces(request)):
            return self._streamed(text, request, list(token_ids), list(prompt_token_ids), ending)
        text = self._without_end(text, token_ids, request, ending)
        thought = None
        if self._marked is not None:
            reading = self._marked.reading(prompt_token_ids, request)
            thought, text, token_ids = reading.read(text, token_ids, finished=True)
        reasoning, content, calls = super().parse(text, request, auto_tools, token_ids)  # type: ignore[misc]
        if self._marked is not None:
            reasoning, content = thought or None, content or None
        valid = [call for call in calls or () if self._is_call(call.name, call.arguments, request)]
        if request.parallel_tool_calls is False:
            valid = valid[:1]
        if valid:
            # A stream holds back what may be the space before a call.
            return reasoning, (content or "").rstrip() or None, valid
        if calls:
            # None of it was a call, so that all of it is text.
            content = self._content(text, request)
        return reasoning, content, valid if calls else calls

    def _streamed(
        self,
        text: str,
        request: Any,
        token_ids: list[int],
        prompt_token_ids: list[int],
        ending: Ending,
    ) -> Parts:
        """Return the parts of an answer that is streamed to a parser of its own."""
        pieces = [(text, token_ids)]
        if not self._takes_any_pieces(request):
            pieces = get_pieces(
                self.model_tokenizer,  # type: ignore[attr-defined]
                text,
                token_ids,
                prompt_token_ids,
                skip_special_tokens=request.skip_special_tokens,
            )
        args, kwargs = self._arguments
        parser = type(self)(*args, **kwargs)
        parser.ending = ending
        for number, (piece, tokens) in enumerate(pieces, 1):
            parser.parse_delta(
                piece, tokens, request, prompt_token_ids, finished=number == len(pieces)
            )
        assert parser.streamed is not None
        return parser.streamed.parts()

    def _without_end(
        self, text: str, token_ids: Sequence[int], request: Any, ending: Ending | None
    ) -> str:
        """Return the text of a piece without the special token that ended it, if it is hidden.

        `ending`: of the answer, None before its last piece.
        """
        if ending is None or ending.reason != "stop" or isinstance(ending.matched, str):
            return text
        tokenizer = self.model_tokenizer  # type: ignore[attr-defined]
        is_special = bool(token_ids) and token_ids[-1] in tokenizer.all_special_ids
        if is_special and hides_end_token(request):
            return text.removesuffix(tokenizer.decode([token_ids[-1]]))
        return text

    def _takes_any_pieces(self, request: Any) -> bool:
        """Return True if an answer may be parsed as one piece, with the same result."""
        if self._engine_based:  # type: ignore[attr-defined]
            return True
        reads = isinstance(self.tool_parser, JsonCalls) and self.tool_parser.reader(request)  # type: ignore[attr-defined]
        return self._reasoning_parser is None and bool(reads)

    def _may_call(self, request: Any) -> bool:
        """Return True if the answer of a request may have tool calls."""
        able = self.tool_parser is not None and bool(request.tools)  # type: ignore[attr-defined]
        return able and request.tool_choice not in (None, "none")

    def _plain(self, request: Any) -> Any:
        """Return the request with a choice that vLLM's parsers know."""
        choice = plain_choice(request)
        if choice is request.tool_choice:
            return request
        if self._plain_request is None:
            self._plain_request = request.model_copy(update={"tool_choice": choice})
        return self._plain_request

    @staticmethod
    def _is_call(name: str | None, arguments: str, request: Any) -> bool:
        return arguments.lstrip().startswith("{") and name in callable_names(request)

    def _content(self, text: str, request: Any) -> str | None:
        content: str | None = self.extract_reasoning(text, request)[1]  # type: ignore[attr-defined]
        return content


def _with_reasoning(delta: Any, reasoning: str) -> Any:
    delta = DeltaMessage() if delta is None else delta
    delta.reasoning = reasoning
    return delta


def _joined(delta: Any, more: Any) -> Any:
    """Return a delta with what follows it; the calls of the two differ."""
    if delta is None or more is None:
        return more if delta is None else delta
    delta.content = (delta.content or "") + (more.content or "") or None
    delta.tool_calls = [*delta.tool_calls, *more.tool_calls]
    return delta
