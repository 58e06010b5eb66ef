"""Structured outputs of a real server: every 200 obeys its schema, every refusal comes first.

The default run is a sample; `wide` runs what the sample is of.
"""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from jsonschema import Draft202012Validator

from tests.checkpoints import CheckpointCache
from tests.schema_corpus import BAD, GOOD, SchemaGenerator
from tests.server.real_server import RealServer
from tests.server.structured_outputs.hostile_bodies import hostile_body, lag_of, lag_summary

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}, "up": {"type": "boolean"}},
    "required": ["x", "up"],
    "additionalProperties": False,
}
SLOW: dict[str, Any] = {
    "type": "object",
    "properties": {f"p{i}": {"type": "integer"} for i in range(250)},
    "maxProperties": 120,
    "additionalProperties": False,
}
"""Takes xgrammar many seconds to compile."""
SLOW_FORMAT = {"type": "json_schema", "json_schema": SLOW, "style": "qwen_xml"}
SLOW_TAG = json.dumps({"type": "structural_tag", "format": SLOW_FORMAT})


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("s")
    # The model's own shows all of every tool, more than its context of 256 tokens holds.
    template = folder / "template.jinja"
    template.write_text(
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    flags += ("--chat-template", str(template))
    flags += ("--schema-compile-cpu-s", "2", "--max-in-flight", "64")
    with RealServer(checkpoints("llama"), folder, *flags) as up:
        up.until_ready()
        yield up


def request_for(index: int, schema: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a path and a body with the schema, in turn in each form; every other one streams."""
    nested = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    ways: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": HI, "response_format": nested}),
        ("/v1/completions", {"prompt": "a b", "structured_outputs": {"json": schema}}),
        ("/v1/completions", {"prompt": "a b", "structured_outputs": {"json": json.dumps(schema)}}),
        (CHAT, {"messages": HI, "structured_outputs": {"json": schema}}),
        ("/v1/completions", {"prompt": "a", "response_format": nested}),
    ]
    path, body = ways[index % len(ways)]
    common = {"model": "tiny", "max_tokens": 200, "seed": index, "temperature": 1.0}
    return path, common | body | {"stream": index % 2 == 1}


def get_answer(response: httpx.Response) -> tuple[str, str]:
    """Text and finish reason of a whole or streamed answer."""
    if response.headers["content-type"].startswith("application/json"):
        choices = response.json()["choices"]
    else:
        frames = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for frame in frames for choice in json.loads(frame)["choices"]]
    text = "".join(
        choice.get("text")
        or (choice.get("delta") or choice.get("message") or {}).get("content")
        or ""
        for choice in choices
    )
    return text, choices[-1]["finish_reason"]


async def ask_for_all(
    server: RealServer, schemas: list[dict[str, Any]]
) -> tuple[Counter[str], list[Any]]:
    """Ask for each schema, eight at a time; count the outcomes and collect what is wrong."""
    outcomes: Counter[str] = Counter()
    wrong: list[Any] = []
    turn = asyncio.Semaphore(8)

    async def ask(index: int, schema: dict[str, Any]) -> None:
        path, body = request_for(index, schema)
        async with turn:
            response = await client.post(path, json=body)
        if response.status_code == 400:
            outcomes["refused"] += 1
            error = response.json()["error"]
            if error["code"] != "invalid_json_schema" or error["param"] is None:
                wrong.append((schema, error))
            return
        if response.status_code != 200:
            wrong.append((schema, response.status_code, response.text))
            return
        text, reason = get_answer(response)
        outcomes[reason] += 1
        if reason != "stop":
            return
        problems = [e.message for e in Draft202012Validator(schema).iter_errors(json.loads(text))]
        if problems:
            wrong.append((schema, text, problems))

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        await asyncio.gather(*(ask(i, schema) for i, schema in enumerate(schemas)))
    return outcomes, wrong


def make_schemas(count: int, seed: int) -> list[dict[str, Any]]:
    """Half of them within what a grammar can follow."""
    made = SchemaGenerator(seed)
    return [made.plain(1 + i % 3) if i % 2 else made.wild(1 + i % 3) for i in range(count)]


async def test_every_answer_obeys_its_schema(server: RealServer, tmp_path: Path) -> None:
    with lag_of(server, tmp_path) as lag:
        outcomes, wrong = await ask_for_all(server, [*GOOD, *make_schemas(60, seed=1)])
    assert wrong == []
    assert outcomes["stop"] > 2 * outcomes["length"]
    assert outcomes["refused"] > 10
    assert len(lag) > 10


@pytest.mark.wide
@pytest.mark.timeout(1800)
async def test_every_answer_obeys_its_schema_widely(server: RealServer, tmp_path: Path) -> None:
    schemas = [*GOOD, *make_schemas(1400, seed=2)]
    with lag_of(server, tmp_path) as lag:
        outcomes, wrong = await ask_for_all(server, schemas)
    print(outcomes, lag_summary(lag))  # noqa: T201
    assert wrong == []
    assert outcomes["stop"] >= 500
    assert outcomes["refused"] >= 200


HIDDEN = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 5000},
        "b": {"type": "string", "pattern": "^(?:.*[a-m]){30}.{3,40}[n-z]{20}$"},
    },
    "required": ["a", "b"],
}
"""A pattern of too much work, where a walk of a few tokens does not come."""


def test_what_cannot_be_followed_is_refused_before_the_stream(server: RealServer) -> None:
    for schema, words in (*BAD, (HIDDEN, "takes too much work")):
        for stream in (False, True):
            body = {"model": "tiny", "messages": HI, "stream": stream}
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            }
            response = server.client.post(CHAT, json=body)
            error = response.json()["error"]
            assert response.status_code == 400, (schema, response.text)
            assert error["code"] == "invalid_json_schema"
            assert error["param"] == "response_format.json_schema.schema"
            assert words in error["message"]


def test_strict_false_is_the_best_effort(client: openai.OpenAI) -> None:
    schema = POINT | {"not": {"required": ["z"]}}
    answer = client.chat.completions.create(
        model="tiny",
        messages=HI,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": False},
        },
    )
    Draft202012Validator(POINT).validate(json.loads(answer.choices[0].message.content or ""))


async def test_a_slow_grammar_is_given_up_and_delays_no_other(
    server: RealServer, tmp_path: Path
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        body = {"model": "tiny", "messages": HI, "structured_outputs": {"structural_tag": SLOW_TAG}}
        with lag_of(server, tmp_path) as lag:
            slow = asyncio.create_task(client.post(CHAT, json=body | {"stream": True}))
            await asyncio.sleep(0.2)
            free = await client.post(CHAT, json={"model": "tiny", "messages": HI, "max_tokens": 8})
            assert free.status_code == 200
            assert not slow.done()
            refused = await slow
        assert refused.status_code == 400
        assert "more than 2 s of processor time" in refused.json()["error"]["message"]
        assert len(lag) > 20
        # It is remembered, and the next grammar finds a process that works.
        spent = 'rbln_grammar_checks_total{result="spent"}'
        tried = server.metric(spent)
        assert (await client.post(CHAT, json=body)).status_code == 400
        assert server.metric(spent) == tried > 0
        guide = {"structured_outputs": {"regex": "[ab]{2}"}}
        good = await client.post(CHAT, json={"model": "tiny", "messages": HI, **guide})
        assert good.status_code == 200


def test_kinds_of_guides(server: RealServer) -> None:
    guides: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["red", "a\nb"]}}, "red|a\nb"),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y" "z"'}}, "x|yz"),
        ({"structured_outputs": {"grammar": "start: 'p' | 'q'"}}, "p|q"),
        ({"response_format": {"type": "structural_tag", "format": {
            "type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "[01]{4}"},
            "end": ">"}}}, "<[01]{4}>"),
    ]  # fmt: skip
    for guide, pattern in guides:
        for stream in (False, True):
            body = {"model": "tiny", "messages": HI, "max_tokens": 40, "stream": stream}
            response = server.client.post(CHAT, json=body | guide)
            assert response.status_code == 200, response.text
            text, reason = get_answer(response)
            assert re.fullmatch(pattern, text), (guide, text)
            assert reason == "stop"


def ask(server: RealServer, path: str = CHAT, **body: Any) -> httpx.Response:
    start = {"prompt": "a b"} if path == "/v1/completions" else {"messages": HI}
    body = {"model": "tiny", "max_tokens": 60, "temperature": 0, **start, **body}
    return server.client.post(path, json=body)


def token_of(server: RealServer, text: str) -> int:
    body = {"model": "tiny", "prompt": text, "add_special_tokens": False}
    (token,) = server.client.post("/tokenize", json=body).json()["tokens"]
    return int(token)


def guides_of(text: str) -> list[dict[str, Any]]:
    """Return a guide of each kind to this text alone, those of JSON to the text in quotes."""
    plain = re.sub(r"(\W)", r"\\\1", text)
    constraints: list[dict[str, Any]] = [
        {"choice": [text]},
        {"regex": plain},
        {"grammar": f"root ::= {json.dumps(text)}"},
        {"grammar": f"start: {json.dumps(text)}"},
        {"grammar": f"%llguidance {{}}\nstart: {json.dumps(text)}"},
        {"json": {"const": text}},
        {"json": {"enum": [text]}},
        {"json": {"type": "string", "pattern": f"^{plain}$"}},
    ]
    return [{"structured_outputs": constraint} for constraint in constraints]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["</tool_call>", "<|im_start|>", "<|im_end|>", "a<|pad|>b"])
def test_the_text_of_a_special_token_is_spelled(
    server: RealServer, text: str, stream: bool
) -> None:
    for guide in guides_of(text):
        answer, reason = get_answer(ask(server, stream=stream, **guide))
        assert (answer.strip('"'), reason) == (text, "stop"), guide
    names = {"type": "object", "properties": {text: {"const": 1}}, "required": [text]}
    answer, _ = get_answer(ask(server, stream=stream, structured_outputs={"json": names}))
    assert json.loads(answer) == {text: 1}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_stop_id_ends_a_guided_answer_only_where_it_may_end(
    server: RealServer, path: str
) -> None:
    name = {"type": "object", "properties": {"ab": {"enum": ["ab a", "ab b"]}}, "required": ["ab"]}
    nested = {"type": "json_schema", "json_schema": {"name": "x", "schema": name}}
    whole = r'\{"ab": ?"ab [ab]"\}'
    guides: list[tuple[dict[str, Any], str]] = [
        ({"response_format": nested}, whole),
        ({"structured_outputs": {"json": name}}, whole),
        ({"response_format": {"type": "json_object"}}, r"\{\}"),
        ({"structured_outputs": {"regex": "xab+y"}}, "xab+y"),
        ({"structured_outputs": {"choice": ["abx", "bay"]}}, "abx|bay"),
        ({"structured_outputs": {"grammar": 'root ::= "(" ("a" | "b") "ab" ")"'}}, r"\([ab]ab\)"),
        ({"structured_outputs": {"grammar": '%llguidance {}\nstart: "cab" | "bac"'}}, "cab|bac"),
        ({"response_format": {"type": "structural_tag", "format": {
            "type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": name},
            "end": ">"}}}, f"<{whole}>"),
    ]  # fmt: skip
    stop, *braces = (token_of(server, text) for text in ("ab", "{", "}"))
    bias = {str(stop): 100, **dict.fromkeys(map(str, braces), 99)}
    for guide, pattern in guides:
        for stream in (False, True):
            body = {**guide, "stop_token_ids": [stop], "logit_bias": bias, "stream": stream}
            answer, reason = get_answer(ask(server, path, **body))
            assert re.fullmatch(pattern, answer), (guide, answer)
            assert reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("guide", "pattern", "reason"),
    [
        ({"choice": ["yes", "no"]}, "yes|no", "stop"),
        ({"regex": "[ab]{3}"}, "[ab]{3}", "stop"),
        ({"grammar": 'root ::= "ab" | "ba"'}, "ab|ba", "stop"),
        ({"json": POINT}, r'\{"x": ?[12], ?"up": ?(true|false)\}', "stop"),
        # What may end goes on.
        ({"regex": "[ab]+"}, "[ab]{60,}", "length"),
        ({"grammar": "root ::= [ab]+"}, "[ab]{60,}", "length"),
    ],
)
def test_an_answer_that_ignores_its_end_ends_with_its_grammar(
    server: RealServer, guide: dict[str, Any], pattern: str, reason: str, stream: bool
) -> None:
    # The end of a turn is the likeliest token.
    body = {"structured_outputs": guide, "ignore_eos": True, "logit_bias": {"3": 100}}
    for path in (CHAT, "/v1/completions"):
        text, ended = get_answer(ask(server, path, **body, stream=stream))
        assert re.fullmatch(pattern, text) and ended == reason, (text, ended)


NO_GUIDES: list[tuple[Any, str, str]] = [
    ({"foo": 1}, "unknown_field", "structured_outputs.foo"),
    ({"regex": "a", "foo": 1}, "unknown_field", "structured_outputs.foo"),
    *((value, "invalid_value", "structured_outputs") for value in ({}, {"json": None})),
    *((value, "invalid_type", "structured_outputs") for value in (5, "x", [], True)),
    *(
        ({"structural_tag": text}, "invalid_grammar", "structured_outputs.structural_tag")
        for text in ("", "null", "5", "[]", "{}", '"a"', "true", '{"format": 5}',
                     '{"structures": 5}', '{"structures": [{}], "triggers": ["a"]}',
                     '{"format": {"type": "regex", "pattern": "\\\\ud83d"}}',
                     '{"format": {"type": "regex", "pattern": "a\\\\h"}}',
                     '{"format": {"type": "const_string", "value": "\\ud83d"}}')
    ),
    *(
        ({kind: text}, "invalid_grammar", f"structured_outputs.{kind}")
        for kind, text in (("regex", ""), ("regex", "a\\h"), ("regex", "a\\ud83d"),
                           ("regex", "\\uD83D\\uDE00"), ("choice", []), ("grammar", ""),
                           ("grammar", "null"), ("grammar", 'root ::= "\\ud83d"'),
                           ("grammar", 'root ::= [\\uD800-\\uDFFF]'),
                           ("grammar", 'start: "\\ud83d"'),
                           ("grammar", '%llguidance {}\nstart: "\\ud83d"'),
                           ("grammar", "%llguidance {}\nstart: /\\ud83d/"))
    ),
    *(
        ({"json": text}, "invalid_json_schema", "structured_outputs.json")
        for text in ("", "null", "5", "[]", '{"const": "\\ud83d"}')
    ),
    *(
        ({kind: value}, "invalid_type", f"structured_outputs.{kind}")
        for kind in ("regex", "grammar", "choice", "structural_tag", "json", "json_object")
        for value in (5, 1.5)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("guide", "code", "param"), NO_GUIDES)
def test_what_is_no_guide_is_refused_by_its_field(
    server: RealServer, guide: Any, code: str, param: str
) -> None:
    for stream in (False, True):
        response = ask(server, structured_outputs=guide, stream=stream)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["code"], error["param"]) == (code, param)
        assert not re.search("NoneType|'int'|_backend", error["message"])
    if code == "invalid_grammar":
        ((kind, text),) = guide.items()
        verdict = server.client.post("/v1/structured_outputs/validate", json={kind: text}).json()
        assert (verdict["valid"], verdict["code"]) == (False, code)


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("structured_outputs", {"choice": ["a", "\ud83d"]}, "structured_outputs.choice[1]"),
        ("structured_outputs", {"regex": "a\ude00"}, "structured_outputs.regex"),
        ("response_format", {"type": "structural_tag", "\ud83d": 1}, "response_format"),
    ],
)
def test_half_of_a_pair_in_a_body_is_named(
    server: RealServer, field: str, value: Any, place: str
) -> None:
    body = json.dumps({"model": "tiny", "messages": HI, field: value}).encode()
    headers = {"content-type": "application/json"}
    response = server.client.post(CHAT, content=body, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, place)


def test_an_empty_schema_of_messages_is_any_json(server: RealServer) -> None:
    def text_of(form: dict[str, Any], prompt: str) -> httpx.Response:
        message = {"role": "user", "content": prompt}
        config = {"output_config": {"format": form}}
        return ask(server, "/v1/messages", messages=[message], **config)

    for prompt in ("hi", "a b", "c", "Hello!"):
        found = text_of({"type": "json_schema", "schema": {}}, prompt).json()["content"][0]["text"]
        assert found[0] in '"{[-0123456789tfn', found
    for form, param in (({}, "schema"), ({"type": "json_schema"}, "schema")):
        error = text_of(form, "hi").json()["error"]
        assert f"output_config.format.{param}" in error["message"]


def test_responses_follow_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "p", "schema": POINT, "strict": True}}
    whole = client.responses.create(model="tiny", input="hi", text=form, store=False)
    Draft202012Validator(POINT).validate(json.loads(whole.output_text))
    events = client.responses.create(model="tiny", input="hi", text=form, stream=True)
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    Draft202012Validator(POINT).validate(json.loads(text))


CALL: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}, "y": {"type": "string", "maxLength": 2}},
    "required": ["x"],
    "if": {"properties": {"x": {"const": 1}}},
    "then": {"required": ["y"]},
}
"""xgrammar does not follow `if`."""


def a_tool(name: str, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": CALL, **more}}


def test_tools_required_named_and_strict(client: openai.OpenAI) -> None:
    tools = [a_tool("go", strict=True), a_tool("come")]
    body: dict[str, Any] = {"model": "tiny", "messages": HI, "tools": tools, "max_tokens": 90}
    # Ends as soon as it may: 3 is the token that ends a turn.
    body |= {"temperature": 0, "logit_bias": {"3": 100}}
    required = client.chat.completions.create(**body, tool_choice="required").choices[0].message
    assert required.tool_calls
    named: Any = {"type": "function", "function": {"name": "come"}}
    by_name = client.chat.completions.create(**body, tool_choice=named).choices[0].message
    assert [call.function.name for call in by_name.tool_calls or []] == ["come"]
    for call in [*required.tool_calls, *(by_name.tool_calls or [])]:
        Draft202012Validator(CALL).validate(json.loads(call.function.arguments))
    chunks = client.chat.completions.create(**body, tool_choice=named, stream=True)
    deltas = [c.choices[0].delta.tool_calls for c in chunks if c.choices]
    parts = [d[0].function.arguments or "" for d in deltas if d and d[0].function]
    Draft202012Validator(CALL).validate(json.loads("".join(parts)))
    with pytest.raises(openai.BadRequestError) as caught:
        bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"(a)\1"}}}
        strict = [a_tool("go"), a_tool("no", strict=True, parameters=bad)]
        client.chat.completions.create(**body | {"tools": strict}, tool_choice="auto", stream=True)
    assert caught.value.code == "invalid_json_schema"
    assert caught.value.param == "tools[1].function.parameters"


def ordinary(number: int) -> dict[str, Any]:
    """Return the parameters of a tool as editors and agents have them."""
    properties = {f"field_{number}_{i}": {"type": "string", "maxLength": 400} for i in range(4)}
    lines = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99999}}
    mode = {"enum": ["read", "write", f"mode_{number}"]}
    return {
        "type": "object",
        "properties": {**properties, "lines": lines, "mode": mode},
        "required": ["mode"],
        "additionalProperties": False,
    }


def test_twenty_four_ordinary_tools_can_be_demanded(client: openai.OpenAI) -> None:
    tools = [a_tool(f"tool_{i}", parameters=ordinary(i)) for i in range(24)]
    body: dict[str, Any] = {"model": "tiny", "messages": HI, "tools": tools, "max_tokens": 4}
    for name in ("tool_7", "tool_23"):
        named: Any = {"type": "function", "function": {"name": name}}
        assert client.chat.completions.create(**body, tool_choice=named).choices
    assert client.chat.completions.create(**body, tool_choice="required").choices


def memory_of(server: RealServer) -> int:
    """Bytes that the server's processes hold for themselves."""
    root = psutil.Process(server.process.pid)
    return sum(p.memory_full_info().uss for p in (root, *root.children(recursive=True)))


async def send_hostile(server: RealServer, count: int, seed: int) -> Counter[int]:
    """Send so many bodies, eight at a time; count the statuses."""
    pick = random.Random(seed)
    bodies = (json.dumps(hostile_body(pick)).encode() for _ in range(count))
    statuses: Counter[int] = Counter()

    async def send() -> None:
        headers = {"content-type": "application/json"}
        for body in bodies:
            response = await client.post(CHAT, content=body, headers=headers)
            statuses[response.status_code] += 1
            assert response.status_code in (200, 400, 413, 429), (body[:500], response.text)

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        await asyncio.gather(*(send() for _ in range(8)))
    return statuses


async def test_hostile_bodies_do_no_harm(server: RealServer) -> None:
    statuses = await send_hostile(server, 150, seed=1)
    assert statuses[400] > 50
    assert server.client.get("/readyz").status_code == 200
    assert server.metric("vllm:num_requests_running") == 0


@pytest.mark.wide
@pytest.mark.timeout(3600)
async def test_ten_thousand_hostile_bodies_leave_no_trace(
    server: RealServer, tmp_path: Path
) -> None:
    await send_hostile(server, 2000, seed=2)
    before = memory_of(server)
    with lag_of(server, tmp_path) as lag:
        statuses = await send_hostile(server, 8000, seed=3)
    grown = memory_of(server) - before
    print(statuses, lag_summary(lag), f"grown by {grown >> 20} MiB")  # noqa: T201
    assert grown < 100 << 20
    assert server.client.get("/readyz").status_code == 200


def test_the_route_and_the_metrics(server: RealServer) -> None:
    path = "/v1/structured_outputs/validate"
    schema = POINT | {"title": "another"}
    first = server.client.post(path, json={"json": schema}).json()
    again = server.client.post(path, json={"json": schema}).json()
    assert first["valid"] and again["valid"]
    assert (first["cached"], again["cached"]) == (False, True)
    assert first["compile_ms"] > 0
    for body in ({"regex": "(("}, {"choice": []}, {"grammar": "root ::= x"}, {"json": {"not": 1}}):
        verdict = server.client.post(path, json=body).json()
        assert not verdict["valid"] and verdict["reason"]
    assert server.metric('rbln_grammar_checks_total{result="refused"}') > 0
    assert server.metric("rbln_grammar_compile_seconds_count") > 0
    log = Path(server.log).read_text()
    assert "Traceback" not in log
