"""The Responses API: vLLM's serving class, and its answers and events in OpenAI's form.

vLLM gives each item one id in the events and another in the response that ends the stream, which
it parses again from the whole text. Here an item is opened once, grows and is closed; the response
at the end has those items. Invariant: every id, text and argument of the last event is that of the
events before it.

Of an item, `opening` yields the events that announce it, `grow` those for one of vLLM's (deltas of
the item, nothing for others), and `closing` those that end it; `cut`: the response is incomplete
and ends here. Then `item` is the item of the response.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_text_delta_event import Logprob
from pydantic_core import to_json
from starlette.responses import Response
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from server.errors import InternalError, ServerError
from server.request.record import RequestRecord
from server.storage.compaction import compacted, compaction_item
from server.structured_outputs.custom_tools import CALL, InputReader, get_input
from server.tools import Ending, is_whole
from server.vllm.logprobs import UnsentLogprobs, add_bytes, most_likely, placed_entries
from server.vllm.serving import GenerationServing, mark_unfinished, read_whole
from server.wire import JsonObject, named_frame

_ID_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", CALL: "ctc_"}
Events = Iterator[JsonObject]
"""Events without the two fields that the stream adds, `sequence_number` and `output_index`."""


def _new_id(kind: str) -> str:
    return _ID_PREFIXES[kind] + uuid.uuid4().hex


def _opened(kind: str, **fields: Any) -> JsonObject:
    return {"id": _new_id(kind), "type": kind, "status": "in_progress", **fields}


class TextItem:
    """A message or reasoning, with one part of text."""

    def __init__(self, kind: str) -> None:
        """`kind` is `message` or `reasoning`."""
        self.is_message = kind == "message"
        self._name = "output_text" if self.is_message else "reasoning_text"
        self._delta = f"response.{self._name}.delta"
        head: JsonObject = {"role": "assistant"} if self.is_message else {"summary": []}
        self.item = _opened(kind, **head, content=[])
        self._place = {"item_id": self.item["id"], "content_index": 0}
        self._texts: list[str] = []
        self.logprobs: list[JsonObject] = []

    def opening(self) -> Events:
        yield {"type": "response.output_item.added", "item": self.item}
        yield {"type": "response.content_part.added", **self._place, "part": self._part("")}

    def grow(self, event: Any) -> Events:
        if event.type != self._delta:
            return
        self._texts.append(event.delta)
        event_json = {"type": self._delta, **self._place, "delta": event.delta}
        if self.is_message:
            event_json["logprobs"] = [one.model_dump() for one in event.logprobs or ()]
            self.logprobs += event_json["logprobs"]
        yield event_json

    def closing(self, *, cut: bool) -> Events:
        text = "".join(self._texts)
        part = self._part(text)
        done = {"type": f"response.{self._name}.done", **self._place, "text": text}
        yield done | ({"logprobs": self.logprobs} if self.is_message else {})
        yield {"type": "response.content_part.done", **self._place, "part": part}
        status = "incomplete" if cut else "completed"
        self.item = {**self.item, "status": status, "content": [part]}
        yield {"type": "response.output_item.done", "item": self.item}

    def _part(self, text: str) -> JsonObject:
        part: JsonObject = {"type": self._name, "text": text}
        return part | ({"annotations": [], "logprobs": self.logprobs} if self.is_message else {})


_ARGUMENTS = "response.function_call_arguments"
"""Prefix of the types of vLLM's events about arguments."""


class ClientCall:
    """A call that the client runs; its text, in one field of the item, grows with the arguments.

    `custom`: of a custom tool, whose text is the input that the arguments hold.
    """

    def __init__(self, added: Any, *, custom: bool = False) -> None:
        """`added` is the item as vLLM announces it."""
        kind, self._field, self._events = "function_call", "arguments", _ARGUMENTS
        if custom:
            kind, self._field, self._events = CALL, "input", "response.custom_tool_call_input"
        self._reader = InputReader() if custom else None
        text = {self._field: ""}
        self.item = _opened(kind, call_id=added.call_id, name=added.name, **text)
        if not custom and (namespace := getattr(added, "namespace", None)) is not None:
            self.item["namespace"] = namespace
        self._arguments: list[str] = []
        self._pieces: list[str] = []

    def opening(self) -> Events:
        yield {"type": "response.output_item.added", "item": self.item}

    def grow(self, event: Any) -> Events:
        if event.type == f"{_ARGUMENTS}.delta":
            self._arguments.append(event.delta)
            text = event.delta if self._reader is None else self._reader.read(event.delta)
            if text or self._reader is None:
                yield self._piece(text)

    def closing(self, *, cut: bool) -> Events:
        # The text that was held back.
        if self._reader is not None and (rest := self._reader.end()):
            yield self._piece(rest)
        text = "".join(self._pieces)
        cut = cut and not is_whole("".join(self._arguments))
        if not cut:
            # Clients run calls at this event.
            done = {"type": f"{self._events}.done", "item_id": self.item["id"]}
            named = {"name": self.item["name"]} if self._reader is None else {}
            yield {**done, **named, self._field: text}
        status = "incomplete" if cut else "completed"
        self.item = {**self.item, "status": status, self._field: text}
        yield {"type": "response.output_item.done", "item": self.item}

    def _piece(self, text: str) -> JsonObject:
        self._pieces.append(text)
        return {"type": f"{self._events}.delta", "item_id": self.item["id"], "delta": text}


def custom_call(item: JsonObject) -> JsonObject:
    """Return the call of a custom tool for vLLM's whole call of the function in its place."""
    common = {k: v for k, v in item.items() if k not in ("arguments", "namespace")}
    return {**common, "id": _new_id(CALL), "type": CALL, "input": get_input(item["arguments"])}


class ServerToolCall:
    """A call of a built-in tool of gpt-oss; vLLM's events are passed on."""

    def __init__(self) -> None:
        self.item: JsonObject = {}

    def opening(self) -> Events:
        """Yield nothing: vLLM's own event is passed on by `grow`."""
        return iter(())

    def grow(self, event: Any) -> Events:
        event_json: JsonObject = event.model_dump(mode="json", by_alias=True, exclude_none=True)
        if "item" in event_json:
            self.item = event_json["item"]
        yield event_json

    def closing(self, *, cut: bool) -> Events:  # noqa: ARG002 (it was ended before)
        """Yield nothing: vLLM has ended it."""
        return iter(())


OutputItem = TextItem | ClientCall | ServerToolCall


def output_item(added: Any, custom_tools: Collection[str]) -> OutputItem:
    """Return the item that vLLM's `response.output_item.added` announces.

    Calls of the functions that replace `custom_tools` are calls of those.
    """
    if added.type == "function_call":
        return ClientCall(added, custom=added.name in custom_tools)
    if added.type in ("message", "reasoning"):
        return TextItem(added.type)
    return ServerToolCall()


_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""The reasons that OpenAI has for an incomplete response, by finish reason."""
_VLLM_FIELDS = (
    "kv_transfer_params",
    "ec_transfer_params",
    "input_messages",
    "output_messages",
    "prompt",
)
"""Fields of vLLM's own, shown if they have a value."""
_PER_TURN = "_per_turn"
_SNAPSHOTS = ("response.created", "response.in_progress")


class Responses(GenerationServing, OpenAIServingResponses):
    """Counts input tokens, too, and reports responses that were cut as `incomplete`.

    Its parsers are `ObjectCallParser`s.
    """

    def _validate_generator_input(self, engine_input: Any) -> None:
        """Do nothing: `EngineClient` checks the length of prompts."""

    async def count_input_tokens(self, request: Any, _: Any = None) -> Any:
        """Return how many tokens the prompt has, or vLLM's error."""
        rendered = await self._render_resolved_response_inputs(request, None)
        if isinstance(rendered, ErrorResponse):
            return rendered
        count = self._extract_prompt_len(rendered.engine_input)
        return Response(to_json({"object": "response.input_tokens", "input_tokens": count}))

    def _process_simple_streaming_events(
        self, request: Any, sampling_params: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        unsent = UnsentLogprobs() if request.is_include_output_logprobs() else None
        contexts = _with_endings(result_generator, request, unsent)
        events = super()._process_simple_streaming_events(
            request, sampling_params, contexts, *args, **kwargs
        )
        return events if unsent is None else unsent.noting_deltas(events)

    async def responses_full_generator(
        self,
        request: Any,
        sampling_params: Any,
        result_generator: Any,
        context: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return a whole response, or the last state of a streamed one."""
        simple = isinstance(context, SimpleContext)
        if simple and context.response_parser is not None:
            result_generator = _read_ahead(result_generator, request, self.enable_auto_tools)
        answer = await super().responses_full_generator(
            request, sampling_params, result_generator, context, *args, **kwargs
        )
        if simple and isinstance(answer, ResponsesResponse):
            # Set the status of a response, which that of its last item follows.
            ending = Ending.of(context.last_output.outputs[0], request)
            calls = [item for item in answer.output[-1:] if item.type == "function_call"]
            if ending.reason != "stop" or not all(is_whole(call.arguments) for call in calls):
                answer.status = "incomplete"
                reason: Any = _REASONS.get(ending.reason)
                answer.incomplete_details = (
                    None if reason is None else IncompleteDetails(reason=reason)
                )
        return answer

    def _create_response_logprobs(
        self,
        token_ids: Sequence[int],  # noqa: ARG002 (the positions have them)
        logprobs: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        return placed_entries(super()._create_response_logprobs, logprobs, *args, **options)

    def _create_stream_response_logprobs(self, *args: Any, **options: Any) -> Any:
        # With the bytes, which vLLM leaves out of streams.
        entries = self._create_response_logprobs(*args, **options)
        return [Logprob.model_validate(entry.model_dump()) for entry in entries]

    def _topk_logprobs(self, logprobs: Any, top_logprobs: int, tokenizer: Any) -> Any:
        likely = most_likely(logprobs, top_logprobs)
        entries = super()._topk_logprobs(likely, top_logprobs=top_logprobs, tokenizer=tokenizer)
        add_bytes(entries, likely, tokenizer)
        return entries


async def _with_endings(
    contexts: Any, request: Any, unsent: UnsentLogprobs | None
) -> AsyncGenerator[Any, None]:
    """Yield the contexts; the parser has the ending before the last delta."""
    async with aclosing(contexts):
        async for context in contexts:
            if unsent is not None:
                unsent.add_to(context.last_output)
            ended = _ended(context)
            if ended is not None and context.response_parser is not None:
                mark_unfinished(context.response_parser, ended, request, context.last_output)
                context.response_parser.ending = Ending.of(ended, request)
            yield context


async def _read_ahead(contexts: Any, request: Any, auto_tools: bool) -> AsyncGenerator[Any, None]:
    """Yield the contexts; what the last one has was parsed."""
    async with aclosing(contexts):
        async for context in contexts:
            ended, result = _ended(context), context.last_output
            if ended is not None:
                mark_unfinished(context.response_parser, ended, request, result)
                await read_whole(context.response_parser, ended, request, result, auto_tools)
            yield context


def _ended(context: Any) -> Any:
    """Return the output of a context that is finished; None before."""
    outputs = context.last_output.outputs
    return outputs[0] if outputs and outputs[0].finish_reason is not None else None


def response_json(answer: Any, extra_fields: JsonObject, record: RequestRecord) -> bytes:
    """Return the body for vLLM's `ResponsesResponse`; `extra_fields` are additional fields."""
    response = make_response(answer, extra_fields, record)
    if record.compacts:
        return to_json(with_summary(response))
    is_cut = response["status"] == "incomplete"
    last = len(response["output"]) - 1
    response["output"] = [
        _item(item, record.custom_tools, is_cut=is_cut and number == last)
        for number, item in enumerate(response["output"])
    ]
    return to_json(response)


def compacted_json(answer: Any, extra_fields: JsonObject, record: RequestRecord) -> bytes:
    """Return the body for vLLM's `ResponsesResponse` that summarises a conversation.

    `extra_fields["output"]` has the messages that stay. Raises `InternalError` without a summary.
    """
    response = make_response(answer, {}, record)
    return to_json(compacted(response, extra_fields["output"], _get_summary(response)))


def with_summary(response: JsonObject) -> JsonObject:
    """Return a response whose one item has its text as a summary, whole at any length.

    Raises `InternalError` for an empty summary.
    """
    ended = {"status": "completed", "incomplete_details": None, "completed_at": int(time.time())}
    return {**response, **ended, "output": [compaction_item(_get_summary(response))]}


def _get_summary(response: JsonObject) -> str:
    # The text of the messages, or of reasoning that took all tokens.
    texts = {"message": "", "reasoning": ""}
    for item in response["output"]:
        if item["type"] in texts:
            texts[item["type"]] += "".join(part["text"] for part in item["content"] or ())
    summary = (texts["message"] or texts["reasoning"]).strip()
    if not summary:
        raise InternalError("The model returned no summary of the conversation; it is unchanged.")
    return summary


def make_response(
    answer: Any, extra_fields: JsonObject, record: RequestRecord | None
) -> JsonObject:
    """Return vLLM's `ResponsesResponse` with OpenAI's fields; its items are vLLM's."""
    response: JsonObject = answer.model_dump(mode="json", by_alias=True)
    for name in _VLLM_FIELDS:
        if response[name] is None:
            del response[name]
    ended = response["status"] == "completed"
    response["completed_at"] = int(time.time()) if ended else None
    response["error"] = None
    if response["usage"] is not None:
        response["usage"] = _usage(response["usage"], record)
    return response | extra_fields


def _usage(usage: JsonObject, record: RequestRecord | None) -> JsonObject:
    """Return OpenAI's usage; vLLM's lists of turns stay where there are several."""
    _, written = (0, 0) if record is None else record.tokens.of_prefix()
    details = _without_empty_turns(usage["input_tokens_details"])
    return {
        **usage,
        "input_tokens_details": {**details, "cache_write_tokens": written},
        "output_tokens_details": _without_empty_turns(usage["output_tokens_details"]),
    }


def _without_empty_turns(details: JsonObject) -> JsonObject:
    return {k: v for k, v in details.items() if v or not k.endswith(_PER_TURN)}


def _item(item: JsonObject, custom_tools: Collection[str], *, is_cut: bool) -> JsonObject:
    """Return an item without the optional fields that it does not use."""
    item = {name: value for name, value in item.items() if value is not None}
    kind = item["type"]
    if kind == "message":
        parts = item["content"] or [{"type": "output_text", "text": "", "annotations": []}]
        item["content"] = [{**part, "logprobs": part.get("logprobs") or []} for part in parts]
    elif kind == "function_call":
        is_cut = is_cut and not is_whole(item["arguments"])
        if item["name"] in custom_tools:
            item = custom_call(item)
    elif kind != "reasoning":
        return item
    return {**item, "status": "incomplete" if is_cut else "completed"}


async def response_frames(
    events: AsyncGenerator[Any, None], extra_fields: JsonObject, record: RequestRecord | None
) -> AsyncGenerator[str, None]:
    """Yield the SSE frames for vLLM's events; each response in them has the `extra_fields`.

    The record's `failure_frames` end a stream that fails.
    """
    stream = _ResponseStream(extra_fields, record)
    if record is not None:
        record.failure_frames = stream.fail
    async with aclosing(events):
        async for event in events:
            for frame in stream.take(event):
                yield frame


class _ResponseStream:
    """One streamed response; at most one item is open."""

    def __init__(self, extra_fields: JsonObject, record: RequestRecord | None) -> None:
        self._extra_fields = extra_fields
        self._record = record
        self._custom_tools = () if record is None else record.custom_tools
        self._begun: JsonObject = {}
        self._number = 0
        self._items: list[JsonObject] = []
        self._open: OutputItem | None = None

    def take(self, event: Any) -> Iterator[str]:
        """Yield the frames of one of vLLM's events.

        Its events that end an item are passed over: whether the item is complete is known when
        the next one begins, or the response ends, which is in the same step of the engine.
        """
        kind = event.type
        compacts = self._record is not None and self._record.compacts
        if compacts and kind == "response.completed":
            response = with_summary(self._response(event))
            self._items = response["output"]
            shown = {"output_index": 0, "item": self._items[0]}
            yield self._frame({"type": "response.output_item.added", **shown})
            yield self._frame({"type": "response.output_item.done", **shown})
            yield self._frame({"type": kind, "response": response})
        elif compacts and kind not in _SNAPSHOTS:
            return
        elif kind == "response.output_item.added":
            yield from self._close(cut=False)
            yield from self._begin(output_item(event.item, self._custom_tools))
            yield from self._grow(event)
        elif kind in _SNAPSHOTS:
            self._begun = self._response(event)
            yield self._frame({"type": kind, "response": self._begun})
        elif kind == "response.completed":
            yield from self._end(event)
        else:
            yield from self._grow(event)

    def _begin(self, item: OutputItem) -> Iterator[str]:
        self._open = item
        yield from self._within(item.opening())

    def _grow(self, event: Any) -> Iterator[str]:
        if self._open is not None:
            yield from self._within(self._open.grow(event))

    def _close(self, *, cut: bool) -> Iterator[str]:
        if self._open is None:
            return
        yield from self._within(self._open.closing(cut=cut))
        self._items.append(self._open.item)
        self._open = None

    def _end(self, event: Any) -> Iterator[str]:
        response = self._response(event)
        is_cut = response["status"] == "incomplete"
        if not self._items and self._open is None and response["output"]:
            # An answer without text has had no delta.
            yield from self._begin(TextItem("message"))
        if not self._items and isinstance(self._open, TextItem) and self._open.is_message:
            # Those of the whole text; deltas lack those of tokens without text.
            messages = (item for item in response["output"] if item["type"] == "message")
            parts = (part for item in messages for part in item["content"])
            self._open.logprobs = next((part["logprobs"] or [] for part in parts), [])
        yield from self._close(cut=is_cut)
        # vLLM calls one completed that was cut.
        kind = "response.incomplete" if is_cut else "response.completed"
        yield self._frame({"type": kind, "response": {**response, "output": self._items}})

    def fail(self, error: ServerError) -> str:
        """Return the frames that end the stream with an error."""
        failed = {
            **self._begun,
            "status": "failed",
            "error": {"code": error.code, "message": error.message},
            "output": self._items,
        }
        event = error.response_event(self._number)
        return self._frame(event) + self._frame({"type": "response.failed", "response": failed})

    def _response(self, event: Any) -> JsonObject:
        return make_response(event.response, self._extra_fields, self._record)

    def _within(self, events: Iterator[JsonObject]) -> Iterator[str]:
        index = {"output_index": len(self._items)}
        for one in events:
            yield self._frame(one | index)

    def _frame(self, event: JsonObject) -> str:
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return named_frame(event["type"], to_json(numbered))
