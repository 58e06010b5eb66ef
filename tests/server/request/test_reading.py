"""Fields within messages, parts, items and tools: those of some form are taken, others refused."""

import ast
import dataclasses
import inspect
import json
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, Required

import pytest
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import TypedDict

from server.errors import InvalidJsonError, InvalidValueError, MissingFieldError, UnknownFieldError
from server.http.middleware import RequestMiddleware
from server.lifecycle import Lifecycle
from server.observability.metrics import ServerMetrics
from server.request.body import drop_billing_line, parse_json_object
from server.request.endpoints import INVOKED, get_forms, invoked_endpoint
from server.request.record import get_record
from server.request.rules import check_shape, get_field_shape, get_shapes, model_field_names
from server.request.sizes import check_call_arguments
from server.request.tables import SHARED, FieldKind, fields_by_name, prompt_fields
from server.vllm.models import request_models
from server.wire import Endpoint
from tests.edges.corpus import BODIES, endpoint_of, large_fields


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
        for name, shape in get_shapes(Request).items():
            check_shape(shape, body.get(name), name, "reject")
    assert caught.value.param == param
    for name, shape in get_shapes(Request).items():
        check_shape(shape, body.get(name), name, "warn")


def test_unknown_fields_that_are_null_are_taken_out() -> None:
    body: Any = {
        "messages": [{"role": "user", "text": None, "content": [{"type": "text", "url": None}]}],
        "option": {"siz": None},
    }
    unset = [
        p
        for n, shape in get_shapes(Request).items()
        for p in check_shape(shape, body[n], n, "reject")
    ]
    assert sorted(unset) == ["messages[0].content[0].url", "messages[0].text", "option.siz"]
    assert body == {"messages": [{"role": "user", "content": [{"type": "text"}]}], "option": {}}


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
    assert set(get_shapes(Request)) == {"messages", "option"}
    for name, shape in get_shapes(Request).items():
        check_shape(shape, body.get(name), name, "reject")
    check_shape(get_field_shape(Any), {"x": 1}, "any", "reject")


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
    shape = get_shapes(request_models()[form])[FIELDS[form]]
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


# ------------------------------------------------------------------------------------- conversation
BILLING = "x-anthropic-billing-header: cc_version=2.1.37; cch=fa690;"


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def dropped(body: dict[str, Any]) -> dict[str, Any]:
    drop_billing_line(body)
    return body


def test_the_line_never_reaches_a_model() -> None:
    body = {"system": [part(BILLING), part("You are"), part("")], "messages": []}
    assert dropped(body)["system"] == [part("You are"), part("")]
    # vLLM drops the whole block that begins with the line.
    assert dropped({"system": [part(f"{BILLING}\nYou are")]})["system"] == [part("You are")]
    assert dropped({"system": BILLING, "messages": []})["system"] == ""
    inline = {"role": "system", "content": f"{BILLING}\nYou are"}
    assert dropped({"messages": [inline]})["messages"] == [{"role": "system", "content": "You are"}]


@pytest.mark.parametrize(
    "body",
    [
        {"system": "Today's date: 2026-11-23", "messages": [{"role": "user", "content": BILLING}]},
        {"system": f"Not at the start: {BILLING}"},
        {"system": 5, "messages": "a"},
        {"system": None, "messages": [None, {"role": "system"}, {"role": "system", "content": 1}]},
    ],
)
def test_nothing_else_is_changed(body: dict[str, Any]) -> None:
    assert dropped(deepcopy(body)) == body


DEPTH = 8


def chat(text: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": text}
    return {
        "messages": [
            {"role": "user"},
            {"role": "assistant", "tool_calls": [{"function": function}]},
        ]
    }


def response(text: Any) -> dict[str, Any]:
    return {"input": [{"type": "function_call", "name": "f", "arguments": text}]}


FORMS = [(chat, "messages[1].tool_calls[0].function.arguments"), (response, "input[0].arguments")]


@pytest.mark.parametrize(("form", "place"), FORMS)
@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("[" * 9 + "]" * 9, "deeper than the limit of 8"),
        ("[" * 100_000, "deeper than the limit of 8"),
        ('{"a":' * 9 + "1" + "}" * 9, "deeper than the limit of 8"),
        ('{"a": "\\\\"' + ', "b": [' * 9, "deeper than the limit of 8"),
        ("9" * 401, "more than 400 digits"),
        (f'{{"a": [-{"9" * 5000}]}}', "more than 400 digits"),
    ],
)
def test_arguments_beyond_the_limits(form: Any, place: str, text: str, limit: str) -> None:
    with pytest.raises(InvalidValueError, match=limit) as caught:
        check_call_arguments(form(text), DEPTH)
    assert caught.value.param == place
    assert place in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "[" * 8 + "]" * 8,
        "[{}]" * 20,
        '{"a": "' + "[" * 99 + '"}',
        '{"a": "\\"' + "[" * 99 + '"}',
        '"' + "[" * 99,
        f'{{"a": "{"9" * 5000}", "b": 0.{"9" * 500}, "c": {"9" * 500}e-400}}',
        "not JSON \\",
        "",
        r'{"a": "\ud83d\ude00 \\ud83d é"}',
        None,
        5,
    ],
)
def test_other_arguments_stay(text: Any) -> None:
    for form, _ in FORMS:
        body = form(text)
        check_call_arguments(body, DEPTH)
        assert body == form(text)


def test_halves_of_characters_are_replaced() -> None:
    text = r'{"a": "\ud83d \uDE00 \ud83d\ud83d\ude00 \\\ud83d", "\udead": 1}'
    whole = r'{"a": "\ufffd \ufffd \ufffd\ud83d\ude00 \\\ufffd", "\ufffd": 1}'
    for form, _ in FORMS:
        body = form(text)
        check_call_arguments(body, DEPTH)
        assert body == form(whole)
    assert json.loads(whole)["a"] == "\ufffd \ufffd \ufffd\U0001f600 \\\ufffd"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": "text"},
        {"input": ["a", 1]},
        {"messages": 5},
        {"messages": [{"tool_calls": 5}]},
    ],
)
def test_other_bodies_are_left_to_the_models(body: dict[str, Any]) -> None:
    check_call_arguments(body, DEPTH)


def test_halves_in_arguments_that_the_client_has_parsed() -> None:
    call: dict[str, Any] = {"type": "tool_use", "id": "1", "input": {"a": "\ud83d"}}
    turns: list[Any] = [{"role": "user", "content": "é"}, {"role": "assistant", "content": [call]}]
    body = parse_json_object(json.dumps({"messages": turns}).encode(), DEPTH)
    call["input"] = {"a": "\ufffd"}
    assert body == {"messages": turns}
    turns[0]["content"] = "\ud83d"
    with pytest.raises(InvalidJsonError, match="half of a surrogate pair") as caught:
        parse_json_object(json.dumps({"messages": turns}).encode(), DEPTH)
    assert caught.value.param == "messages[0].content"


# ---------------------------------------------------------------------------------------- endpoints
CONTENT = [FieldKind.MESSAGES, FieldKind.CONVERSATION, FieldKind.PROMPTS, FieldKind.TEXT]
CONTENT.append(FieldKind.TOKENS)


def test_every_field_that_may_be_large_says_what_it_holds() -> None:
    for form, name in large_fields():
        assert name in fields_by_name(endpoint_of(form)), "server/request/tables.py"


def test_no_field_is_described_that_no_model_has() -> None:
    names = set().union(*map(model_field_names, request_models().values()))
    # vLLM's models do not have them: the service ignores one, and works on the other itself.
    assert {row.path for row in SHARED} - names <= {"prompt_cache_key", "prediction"}


def test_every_endpoint_has_its_forms_and_prompts() -> None:
    models = request_models()
    assert set(BODIES) == set(models)
    for endpoint in Endpoint:
        forms = get_forms(endpoint, models)
        assert forms, endpoint
        fields = set().union(*(models[form].model_fields for form in forms))
        named = {*prompt_fields(endpoint)}
        assert named & fields, endpoint
        rows = fields_by_name(endpoint)
        content = {name for name in fields if name in rows and rows[name].kind in CONTENT}
        # Text that goes with prompts of the kinds that are counted, blamed and looked into.
        assert content - named <= {"instruction", "documents", "prompt_embeds", "suffix"}, endpoint


@pytest.mark.parametrize("form", list(BODIES))
def test_valid_bodies_are_those_of_their_forms(form: str) -> None:
    from server.request.endpoints import request_form

    assert request_form(endpoint_of(form), BODIES[form]) == form


# --------------------------------------------------------------------------------------- invocation
POOLING = frozenset({Endpoint.EMBEDDINGS, Endpoint.RERANK, Endpoint.SCORE, Endpoint.POOLING})


@pytest.mark.parametrize(
    ("names", "offered", "expected"),
    [
        ({"messages", "model"}, {Endpoint.CHAT, Endpoint.COMPLETION}, Endpoint.CHAT),
        ({"prompt"}, {Endpoint.CHAT, Endpoint.COMPLETION}, Endpoint.COMPLETION),
        ({"messages", "prompt"}, {Endpoint.CHAT, Endpoint.COMPLETION}, Endpoint.CHAT),
        ({"input"}, POOLING, Endpoint.EMBEDDINGS),
        ({"messages"}, POOLING, Endpoint.EMBEDDINGS),
        ({"query", "documents"}, POOLING, Endpoint.RERANK),
        ({"queries", "documents"}, POOLING, Endpoint.SCORE),
        ({"text_1", "text_2"}, POOLING, Endpoint.SCORE),
        ({"input"}, {Endpoint.CLASSIFY, Endpoint.POOLING}, Endpoint.CLASSIFY),
        ({"input"}, {Endpoint.POOLING}, Endpoint.POOLING),
    ],
)
def test_fields_decide(names: set[str], offered: set[Endpoint], expected: Endpoint) -> None:
    assert invoked_endpoint(names, offered) is expected


def test_an_error_names_the_fields_of_the_offered_endpoints() -> None:
    with pytest.raises(MissingFieldError) as caught:
        invoked_endpoint({"input"}, {Endpoint.CHAT, Endpoint.COMPLETION})
    assert caught.value.message == (
        "/invocations needs 'messages' for /v1/chat/completions; 'prompt' for /v1/completions."
    )


def test_the_order_is_that_of_vllm() -> None:
    from vllm.entrypoints.generate.factories import get_generate_invocation_types
    from vllm.entrypoints.pooling.factories import get_pooling_invocation_types

    serving = {
        "create_chat_completion": Endpoint.CHAT,
        "create_completion": Endpoint.COMPLETION,
        "create_embedding": Endpoint.EMBEDDINGS,
        "create_classify": Endpoint.CLASSIFY,
        "do_rerank": Endpoint.RERANK,
        "create_score": Endpoint.SCORE,
        "create_pooling": Endpoint.POOLING,
    }
    order = [
        serving[node.elts[1].elts[1].id]  # type: ignore[attr-defined]
        for function in (get_generate_invocation_types, get_pooling_invocation_types)
        for node in ast.walk(ast.parse(inspect.getsource(function)))
        if isinstance(node, ast.Tuple)
        and len(node.elts) == 2
        and isinstance(node.elts[1], ast.Tuple)
    ]
    assert tuple(order) == INVOKED


# -------------------------------------------------------------------------------------- request end
async def test_an_end_that_fails_keeps_nothing_from_the_others(tmp_path: Path) -> None:
    ended: list[str] = []

    def fail() -> None:
        ended.append("first")
        raise RuntimeError("broken")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        get_record(scope).on_end += [fail, lambda: ended.append("second")]

    async def nothing(*_: Message) -> Message:
        return {"type": "http.disconnect"}

    metrics = ServerMetrics(tmp_path)
    edge = RequestMiddleware(app, Lifecycle(0.0), metrics, lambda: None)
    scope: Scope = {"type": "http", "path": "/livez", "method": "GET", "headers": []}
    with pytest.raises(RuntimeError, match="broken"):
        await edge(scope, nothing, nothing)
    assert ended == ["first", "second"]
    assert b'rbln_http_requests_total{code="499",method="GET",outcome="aborted"' in metrics.render()
