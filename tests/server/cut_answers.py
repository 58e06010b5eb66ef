"""One answer over a chat, a response or a message, streamed or whole, up to a limit of tokens."""

from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai

OPEN_STATUSES = {"length": "length", "max_tokens": "length", "incomplete": "length"}
CALL_REASONS = ("tool_calls", "tool_use")


@dataclass
class Answer:
    """Text and calls as a client sees them; `ended` says `length`, `calls` or `text`.

    `complete` are the calls that the API reports as complete ones.
    """

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ended: str = ""
    complete: list[str] = field(default_factory=list)


def _reason(given: str, calls: bool) -> str:
    if given in OPEN_STATUSES:
        return "length"
    return "calls" if given in CALL_REASONS or calls else "text"


class Asker:
    """Sends one question with tools over each API of a server."""

    def __init__(self, url: str, model: str, question: str, tools: list[dict[str, Any]]) -> None:
        self._openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        self._anthropic = anthropic.Anthropic(base_url=url, api_key="none")
        self._model, self._question = model, question
        self._tools = tools

    def chat(self, limit: int, stream: bool, choice: str, **more: Any) -> Answer:
        named: Any = {"type": "function", "function": {"name": self._tools[0]["name"]}}
        wish: Any = {
            "model": self._model,
            "messages": [{"role": "user", "content": self._question}],
            "tools": [{"type": "function", "function": tool} for tool in self._tools],
            "tool_choice": named if choice == "named" else choice,
            "temperature": 0,
            "max_tokens": limit,
            "extra_body": more,
        }
        found = Answer()
        if not stream:
            whole = self._openai.chat.completions.create(**wish).choices[0]
            found.text = whole.message.content or ""
            calls = whole.message.tool_calls or []
            found.calls = [(one.function.name, one.function.arguments) for one in calls]
            reason = whole.finish_reason
        else:
            reason = self._chat_stream(wish, found)
        # OpenAI says `stop` for a tool that was named.
        found.ended = _reason(reason, choice == "named" and bool(found.calls))
        if found.ended == "calls":
            found.complete = [arguments for _, arguments in found.calls]
        return found

    def _chat_stream(self, wish: Any, found: Answer) -> str:
        names, arguments, reason = dict[int, str](), dict[int, str](), ""
        for chunk in self._openai.chat.completions.create(**wish, stream=True):
            choice = chunk.choices[0]
            found.text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or []:
                names.setdefault(piece.index, piece.function.name)
                arguments.setdefault(piece.index, "")
                arguments[piece.index] += piece.function.arguments or ""
            reason = choice.finish_reason or reason
        found.calls = [(names[index], arguments[index]) for index in names]
        return reason

    def response(self, limit: int, stream: bool, choice: str, **more: Any) -> Answer:
        """Ask for a response; a stream's events and its last response must agree."""
        wish: Any = {
            "model": self._model,
            "input": self._question,
            "tools": [{"type": "function", "strict": False, **tool} for tool in self._tools],
            "tool_choice": (
                {"type": "function", "name": self._tools[0]["name"]}
                if choice == "named"
                else choice
            ),
            "temperature": 0,
            "max_output_tokens": limit,
            "store": False,
            "extra_body": more,
        }
        if not stream:
            return self._of_response(self._openai.responses.create(**wish))
        events = list(self._openai.responses.create(**wish, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1]
        found = self._of_response(last.response)
        assert last.type == f"response.{last.response.status}"
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == found.text
        items = [e.item for e in events if e.type == "response.output_item.done"]
        calls = [item for item in items if item.type == "function_call"]
        assert [(one.name, one.arguments) for one in calls] == found.calls
        assert [item.status for item in items] == [item.status for item in last.response.output]
        done = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert [one.arguments for one in done] == found.complete
        return found

    def _of_response(self, response: Any) -> Answer:
        found = Answer()
        for item in response.output:
            if item.type == "message":
                found.text += "".join(part.text for part in item.content)
                continue
            found.calls.append((item.name, item.arguments))
            if item.status == "completed":
                found.complete.append(item.arguments)
        found.ended = _reason(response.status, bool(found.calls))
        if found.ended == "length":
            details = response.incomplete_details
            found.ended = "length" if details is not None else "stopped"
            assert details is None or details.reason == "max_output_tokens"
        return found

    def message(self, limit: int, stream: bool, choice: str) -> Answer:
        choices: Any = {
            "auto": {"type": "auto"},
            "required": {"type": "any"},
            "named": {"type": "tool", "name": self._tools[0]["name"]},
        }
        wish: Any = {
            "model": self._model,
            "messages": [{"role": "user", "content": self._question}],
            "tools": [
                {"name": tool["name"], "input_schema": tool["parameters"]} for tool in self._tools
            ],
            "tool_choice": choices[choice],
            "max_tokens": limit,
            "extra_body": {"temperature": 0},
        }
        found = Answer()
        if not stream:
            whole = self._anthropic.messages.create(**wish)
            blocks = [(b.type, getattr(b, "name", None), _block(b)) for b in whole.content]
            reason = whole.stop_reason
        else:
            blocks, reason = self._message_stream(wish)
        found.text = "".join(text for kind, _, text in blocks if kind == "text")
        found.calls = [(name or "", text) for kind, name, text in blocks if kind == "tool_use"]
        found.ended = _reason(reason or "", False)
        if found.ended == "calls":
            found.complete = [arguments for _, arguments in found.calls]
        return found

    def _message_stream(self, wish: Any) -> tuple[list[Any], str | None]:
        blocks: list[Any] = []
        reason = None
        for event in self._anthropic.messages.create(**wish, stream=True):
            if event.type == "content_block_start":
                blocks.append(
                    [event.content_block.type, getattr(event.content_block, "name", None), ""]
                )
            elif event.type == "content_block_delta":
                delta: Any = event.delta
                blocks[-1][2] += delta.text if delta.type == "text_delta" else delta.partial_json
            elif event.type == "message_delta":
                reason = event.delta.stop_reason
        return [tuple(block) for block in blocks], reason


def _block(block: Any) -> Any:
    return block.text if block.type == "text" else block.input
