"""Fields within messages, parts, items and tools: those of some form are taken, others refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, Required

import pytest
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from server.errors import UnknownFieldError
from server.request.rules import check_shape, shape_of, shapes_of
from server.vllm.models import request_models


class Text(TypedDict, total=False):
    type: Required[Literal["text"]]
    text: str


class Picture(TypedDict, total=False):
    type: Required[Literal["picture"]]
    url: str | None


class Said(TypedDict, total=False):
    role: Required[Literal["user"]]
    content: str | Iterable[Text | Picture]


class Answered(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: Literal["assistant"] = "assistant"
    refusal: str | None = Field(None, alias="refused")


@dataclasses.dataclass
class Option:
    size: int = 0
    hidden: int = dataclasses.field(default=0, init=False)


class Request(BaseModel):
    messages: list[Said | Answered]
    option: Option | None = None
    free: dict[str, Any] = {}
    any: Any = None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "text": "a"}]}, "messages[0].text"),
        ({"messages": [{"role": "user", "refusal": "a"}]}, "messages[0].refusal"),
        (
            {"messages": [{}, {"role": "user", "content": [{"type": "text", "url": "a"}]}]},
            "messages[1].content[0].url",
        ),
        ({"option": {"siz": 1}}, "option.siz"),
        ({"option": {"hidden": 1}}, "option.hidden"),
    ],
)
def test_fields_of_no_fitting_form_are_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(UnknownFieldError) as caught:
        for name, shape in shapes_of(Request).items():
            check_shape(shape, body.get(name), name, "reject")
    assert caught.value.param == param
    for name, shape in shapes_of(Request).items():
        check_shape(shape, body.get(name), name, "warn")


def test_unknown_fields_that_are_null_are_taken_out() -> None:
    body: Any = {
        "messages": [{"role": "user", "text": None, "content": [{"type": "text", "url": None}]}],
        "option": {"siz": None},
    }
    unset = [
        p
        for n, shape in shapes_of(Request).items()
        for p in check_shape(shape, body[n], n, "reject")
    ]
    assert sorted(unset) == ["messages[0].content[0].url", "messages[0].text", "option.siz"]
    assert body == {
        "messages": [{"role": "user", "content": [{"type": "text"}]}],
        "option": {},
    }


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "assistant", "refusal": None}, {"refused": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "picture", "url": "a"}, "text"]}]},
        # What is of the wrong type, or of no form at all, is the request model's concern.
        {"messages": [{"role": "nobody", "x": 1}, 7, None, []], "option": []},
        {"messages": {"x": 1}, "free": {"anything": {"goes": 1}}, "any": {"x": [{"y": 1}]}},
    ],
)
def test_others_pass(body: dict[str, Any]) -> None:
    assert set(shapes_of(Request)) == {"messages", "option"}
    for name, shape in shapes_of(Request).items():
        check_shape(shape, body.get(name), name, "reject")
    check_shape(shape_of(Any), {"x": 1}, "any", "reject")


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ECHOED: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"role": "system", "content": "a", "name": "n"},
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "a", "name": "n"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL],
         "reasoning": "b"},
        {"role": "tool", "tool_call_id": "c", "content": "d", "name": "f"},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "d"}]},
    ],
    "responses": [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "id": "m", "role": "user", "status": "completed", "content": "a"},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "a"}],
         "content": [{"type": "reasoning_text", "text": "b"}], "encrypted_content": None},
        {"type": "function_call", "id": "f", "call_id": "c", "name": "f", "arguments": "{}",
         "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": "d", "id": "o"},
        {"type": "function_call_output", "call_id": "c",
         "output": [{"type": "input_text", "text": "d"}]},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "a", "signature": "b"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"anything": {"goes": 1}}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "b"}],
             "is_error": False}]},
    ],
}  # fmt: skip
FIELDS = {"chat": "messages", "responses": "input", "messages": "messages"}


@pytest.mark.parametrize("form", ECHOED)
def test_what_clients_send_is_known_and_nothing_else(form: str) -> None:
    shape = shapes_of(request_models()[form])[FIELDS[form]]
    check_shape(shape, ECHOED[form], "x", "reject")
    for message in ECHOED[form]:
        with pytest.raises(UnknownFieldError):
            check_shape(shape, [{**message, "surprise": 1}], "x", "reject")
        for name, value in message.items():
            if not isinstance(value, list):
                continue
            for part in value:
                with pytest.raises(UnknownFieldError):
                    changed = [{**part, "surprise": 1}]
                    check_shape(shape, [{**message, name: changed}], "x", "reject")
