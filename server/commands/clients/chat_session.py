"""Conversation with a server's chat completions route, streamed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
from pydantic_core import from_json

_DATA = "data:"
_DONE = "[DONE]"
_REASONING = ("reasoning", "reasoning_content")


class ChatError(Exception):
    """The server cannot be reached, or rejected a request; the message is printed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Streamed text, and the part of the answer that it belongs to."""

    kind: Literal["reasoning", "content"]
    text: str


@dataclass(slots=True)
class AnswerTimes:
    """Times of one answer, by `time.monotonic`, and its number of tokens."""

    started: float
    first: float | None = None
    ended: float | None = None
    tokens: int | None = None

    def summary(self) -> str:
        """Return the time to the first token in seconds, and the tokens per second after it."""
        if self.first is None or self.ended is None:
            return "no token"
        text = f"first token after {self.first - self.started:.2f} s"
        seconds = self.ended - self.first
        if self.tokens is None or self.tokens < 2 or seconds <= 0:
            return text
        return f"{text}, {self.tokens} tokens, {(self.tokens - 1) / seconds:.1f} tokens/s"


@dataclass(slots=True)
class ChatSession:
    """Messages of one conversation; an answer that fails or is stopped early is not kept."""

    client: httpx.Client
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    times: AnswerTimes | None = None

    def reset(self) -> None:
        """Forget the conversation; the system prompt stays."""
        self.messages.clear()

    def ask(self, text: str) -> Iterator[Piece]:
        """Send a message and yield the answer as it comes. Raises `ChatError`.

        Closing the iterator early closes the connection, which aborts the request.
        """
        message = {"role": "user", "content": text}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        body = {
            "model": self.model,
            "messages": [*system, *self.messages, message],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        self.times = times = AnswerTimes(time.monotonic())
        parts: list[str] = []
        for piece in self._pieces(body, times):
            times.first = times.first or time.monotonic()
            if piece.kind == "content":
                parts.append(piece.text)
            yield piece
        times.ended = time.monotonic()
        self.messages += [message, {"role": "assistant", "content": "".join(parts)}]

    def _pieces(self, body: Mapping[str, Any], times: AnswerTimes) -> Iterator[Piece]:
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                    raise ChatError(error_text(answer))
                for event in _events(answer):
                    if "error" in event:
                        raise ChatError(str(event["error"].get("message", event["error"])))
                    usage = event.get("usage")
                    if usage:
                        times.tokens = usage["completion_tokens"]
                    yield from _deltas(event)
        except httpx.HTTPError as error:
            raise ChatError(f"{type(error).__name__}: {error}") from error


def first_model(client: httpx.Client) -> str:
    """Return the first model that the server lists. Raises `ChatError`."""
    try:
        answer = client.get("/v1/models")
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise ChatError(f"{client.base_url} cannot be reached: {reason}") from error
    if answer.status_code != httpx.codes.OK:
        raise ChatError(error_text(answer))
    models = answer.json().get("data") or []
    if not models:
        raise ChatError(f"{client.base_url} lists no model")
    return str(models[0]["id"])


def error_text(answer: httpx.Response) -> str:
    """Return the message of an error response, else its status."""
    try:
        return f"{answer.status_code}: {answer.json()['error']['message']}"
    except (ValueError, TypeError, KeyError):
        return f"{answer.status_code} {answer.reason_phrase}"


def _events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if not line.startswith(_DATA):
            continue
        data = line.removeprefix(_DATA).strip()
        if data == _DONE:
            return
        yield dict(from_json(data))


def _deltas(event: Mapping[str, Any]) -> Iterator[Piece]:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        reasoning = next((delta[name] for name in _REASONING if delta.get(name)), None)
        if reasoning:
            yield Piece("reasoning", reasoning)
        if delta.get("content"):
            yield Piece("content", delta["content"])
