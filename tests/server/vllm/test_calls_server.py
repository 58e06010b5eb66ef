"""Tool calls of a real server over each API, whole and streamed: what they are, and refusals."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from default_model.paths import CHECKPOINT
from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer
from tests.server.vllm.agent_sessions import Head, Session, billing

pytestmark = pytest.mark.engine

APIS = ("chat", "responses", "messages")
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
WRITE = {"name": "write", "parameters": TEXT}
CONTEXT = 1024
OPEN = '<tool_call>\n{"name": "write", "arguments": {"text": "one two'
Answer = tuple[str, list[tuple[str, str]]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    flags = ("--max-model-len", str(CONTEXT), "--dtype", "bfloat16")
    with RealServer(CHECKPOINT, tmp_path_factory.mktemp("c"), *flags) as up:
        up.until_ready()
        yield up


def say(text: str) -> dict[str, Any]:
    """Return the constraint that forces the text of an answer."""
    return {"grammar": "root ::= " + json.dumps(text, ensure_ascii=False)}


def tool(api: str, function: dict[str, Any]) -> dict[str, Any]:
    if api == "chat":
        return {"type": "function", "function": function}
    if api == "responses":
        return {"type": "function", **function}
    schema = function.get("parameters", {"type": "object", "properties": {}})
    return {"name": function["name"], "input_schema": schema}


def post(server: RealServer, api: str, *functions: dict[str, Any], **more: Any) -> Any:
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    body = {"model": "tiny", "temperature": 0, limit: 80, **more}
    body["tools"] = [tool(api, one) for one in functions]
    asked = "input" if api == "responses" else "messages"
    body.setdefault(asked, [{"role": "user", "content": "Call it."}])
    return server.client.post(PATHS[api], json=body)


def answer(server: RealServer, api: str, *functions: dict[str, Any], **more: Any) -> Answer:
    """Return the text and the calls of an answer: the same whole and streamed."""
    whole = post(server, api, *functions, **more)
    stream = post(server, api, *functions, stream=True, **more)
    assert (whole.status_code, stream.status_code) == (200, 200), whole.text
    lines = [one.removeprefix("data: ") for one in stream.text.splitlines()]
    events = [json.loads(one) for one in lines if one.startswith("{")]
    found = _whole(api, whole.json())
    assert _streamed(api, events) == found
    return found


def _whole(api: str, body: Any) -> Answer:
    if api == "chat":
        message = body["choices"][0]["message"]
        calls = [one["function"] for one in message.get("tool_calls") or []]
        return message["content"] or "", [(one["name"], one["arguments"]) for one in calls]
    items = body["output" if api == "responses" else "content"]
    if api == "responses":
        parts = [part for one in items if one["type"] == "message" for part in one["content"]]
        calls = [one for one in items if one["type"] == "function_call"]
        return "".join(p["text"] for p in parts), [(c["name"], c["arguments"]) for c in calls]
    text = "".join(one["text"] for one in items if one["type"] == "text")
    uses = [one for one in items if one["type"] == "tool_use"]
    return text, [(one["name"], json.dumps(one["input"])) for one in uses]


def _streamed(api: str, events: list[Any]) -> Answer:
    if api == "responses":
        return _whole(api, events[-1]["response"])
    text, calls = "", dict[int, list[str]]()
    for event in events:
        if api == "chat":
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                for one in choice["delta"].get("tool_calls") or []:
                    call = calls.setdefault(one["index"], [one["function"].get("name"), ""])
                    call[1] += one["function"]["arguments"]
        elif event["type"] == "content_block_start" and "name" in event["content_block"]:
            calls[event["index"]] = [event["content_block"]["name"], ""]
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
            if "partial_json" in event["delta"]:
                calls[event["index"]][1] += event["delta"]["partial_json"]
    if api == "messages":
        return text, [(name, json.dumps(json.loads(text or "{}"))) for name, text in calls.values()]
    return text, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        ('{"text": "x </tool_call> y"}', True),
        ('{"text": "a</tool_call>\\n<tool_call>\\nb"}', True),
        ('{"text": NaN}', False),
        ('{"text": "a\nb"}', False),
        ('{"text": "a",}', False),
    ],
)
def test_a_call_is_its_json(server: RealServer, api: str, arguments: str, calls: bool) -> None:
    text = f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>'
    found = answer(server, api, WRITE, structured_outputs=say(text))
    assert found == (("", [("write", arguments)]) if calls else (text, []))


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": "ping"}</tool_call>', [("ping", "{}")]),
        ('<tool_call>{"name": "ping", "parameters": {"a": 1}}</tool_call>', [("ping", '{"a": 1}')]),
        ('<tool_call>{"name": "p\\u0069ng", "arguments": {}}</tool_call>', [("ping", "{}")]),
        ('<tool_call>{"name": "pong", "arguments": {}}</tool_call>', []),
    ],
)
def test_the_members_of_a_call(server: RealServer, api: str, text: str, calls: Any) -> None:
    found = answer(server, api, {"name": "ping"}, structured_outputs=say(text))
    assert found == ("" if calls else text, calls)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("more", [{}, {"parameters": {"type": "object", "properties": {}}}])
def test_a_tool_without_parameters_has_none(server: RealServer, api: str, more: Any) -> None:
    choice = {"type": "any"} if api == "messages" else "required"
    found = answer(server, api, {"name": "ping", **more}, tool_choice=choice)
    assert found[1][:1] == [("ping", "{}")]


@pytest.mark.parametrize("parameters", [None, {}, {"title": "Ping"}])
def test_parameters_that_say_nothing_are_none(server: RealServer, parameters: Any) -> None:
    ping = {"name": "ping", "parameters": parameters}
    named = {"type": "function", "function": {"name": "ping"}}
    assert answer(server, "chat", ping, tool_choice=named) == ("", [("ping", "{}")])


def test_a_strict_call_of_a_named_tool_has_its_whole_argument(server: RealServer) -> None:
    text = {"type": "string", "pattern": "^x</tool_call[<>]y$"}
    write = {"name": "write", "parameters": {**TEXT, "properties": {"text": text}}, "strict": True}
    named = {"type": "function", "function": {"name": "write"}}
    bias = {"33": 100}
    found = answer(server, "chat", write, tool_choice=named, logit_bias=bias)
    assert found == ("", [("write", '{"text": "x</tool_call>y"}')])


def test_a_stop_within_a_call_cuts_it(server: RealServer) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"name": "get_weather", "parameters": city}
    more: Any = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
    free = post(server, "chat", weather, return_token_ids=True, **more).json()["choices"][0]
    (call,) = free["message"]["tool_calls"]
    full, cuts = call["function"]["arguments"], set[str]()
    for token in set(free["token_ids"]):
        text, calls = answer(server, "chat", weather, stop_token_ids=[token], **more)
        assert text == ""
        assert all(name == "get_weather" and full.startswith(one) for name, one in calls)
        cuts.update(one for _, one in calls)
    assert len(cuts) > 2
    assert answer(server, "chat", weather, stop=["weather"], **more) == ("", [])
    assert answer(server, "chat", weather, stop=["city"], **more) == ("", [("get_weather", '{"')])


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_the_token_that_ends_an_answer_is_not_shown(server: RealServer, api: str) -> None:
    asked = "input" if api == "responses" else "messages"
    more = {asked: [{"role": "user", "content": "Hello!"}], "include_stop_str_in_output": True}
    text, _ = answer(server, api, {"name": "ping"}, **more)
    assert text.endswith("?")
    cut, _ = answer(server, api, {"name": "ping"}, stop=["small"], **more)
    assert cut.endswith("small")
    shown, _ = answer(server, api, {"name": "ping"}, skip_special_tokens=False, **more)
    assert shown == f"{text}<|im_end|>"


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", ["", " ", 'a"b', "a\\b", "</tool_call>", "a\nb", "x" * 257])
def test_a_name_that_no_call_can_have_is_refused(server: RealServer, api: str, name: str) -> None:
    found = post(server, api, {"name": "ping"}, {"name": name})
    assert found.status_code == 400
    error = found.json()["error"]
    path = "tools[1].function.name" if api == "chat" else "tools[1].name"
    assert path in error["message"]
    assert "256" in error["message"]
    assert api == "messages" or (error["param"], error["code"]) == (path, "invalid_value")


def test_names_that_clients_send_are_called(server: RealServer) -> None:
    for name in ("mcp__files.read/text:all", "get weather", "wetter-für_日本", "x" * 200):
        asked = {"tool_choice": "required", "max_tokens": 300}
        assert answer(server, "chat", {"name": name}, **asked)[1] == [(name, "{}")]


def continued(api: str, text: str) -> dict[str, Any]:
    user = {"role": "user", "content": "Call it."}
    if api == "responses":
        part = {"type": "output_text", "text": text, "annotations": []}
        last = {"type": "message", "id": "m", "role": "assistant", "status": "incomplete"}
        return {"input": [user, {**last, "content": [part]}]}
    turns = [user, {"role": "assistant", "content": text}]
    return {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("rest", [' three"}}\n</tool_call>', ' </tool_call>"}}', '"}}\n'])
def test_a_call_that_is_continued_comes_back(server: RealServer, api: str, rest: str) -> None:
    found = answer(server, api, WRITE, structured_outputs=say(rest), **continued(api, OPEN))
    whole = (OPEN + rest).partition('"arguments": ')[2].partition("}")[0] + "}"
    assert found == ("", [("write", whole)])


@pytest.mark.parametrize(
    ("choice", "strict", "param"), [("required", False, "tool_choice"), ("auto", True, "tools")]
)
def test_the_rest_of_a_call_cannot_be_guided(
    server: RealServer, choice: str, strict: bool, param: str
) -> None:
    for api in ("chat", "responses"):
        write = {**WRITE, "strict": strict}
        found = post(server, api, write, tool_choice=choice, **continued(api, OPEN))
        assert found.status_code == 400
        assert found.json()["error"]["param"] == param
        found = post(server, api, write, tool_choice=choice, **continued(api, "I call."))
        assert found.status_code == 200


def test_calls_of_a_message_cannot_be_continued(server: RealServer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    turns: list[Any] = [{"role": "user", "content": "Call it."}]
    turns.append({"role": "assistant", "content": "I will ", "tool_calls": [call]})
    more = {"continue_final_message": True, "add_generation_prompt": False}
    found = post(server, "chat", {"name": "ping"}, messages=turns, **more)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "messages[1].tool_calls"
    assert post(server, "chat", {"name": "ping"}, messages=turns).status_code == 200


def test_a_last_tool_use_is_in_the_prompt(server: RealServer) -> None:
    use = {"type": "tool_use", "id": "t", "name": "ping", "input": {}}
    counts = []
    for given in ({}, {"city": "a long name of a city"}):
        content = [{"type": "text", "text": "I will."}, {**use, "input": given}]
        turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": content}]
        found = post(server, "messages", {"name": "ping"}, messages=turns).json()
        kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        counts.append(sum(found["usage"][kind] for kind in kinds))
    assert counts[1] > counts[0]


# ----------------------------------------------------------------------------------- agent sessions
TURNS = 5
UNIT = 16
"""Tokens by which prefixes are reused: the block size of the test's server."""
GENERATION_PROMPT = 8
"""At least as many tokens as the template adds for the answer to come."""

Ask = Callable[[RealServer, Session], tuple[int, int]]


@pytest.fixture(scope="module")
def session_server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    checkpoint = checkpoints("llama", max_position_embeddings=16384, num_hidden_layers=2)
    flags = ("--max-model-len", "16384", "--max-num-batched-tokens", "512")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with RealServer(checkpoint, tmp_path_factory.mktemp("a"), *flags, *tools) as up:
        up.until_ready()
        yield up


def events(server: RealServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.client.stream("POST", path, json=body) as answer:
        lines = list(answer.iter_lines())
        assert answer.status_code == 200, lines
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


def by_messages(server: RealServer, session: Session) -> tuple[int, int]:
    """Return how many tokens a turn's prompt has, and how many of them were cached."""
    told = events(server, "/v1/messages", session.messages("tiny", 4))
    first, last = told[0]["message"]["usage"], told[-2]["usage"]
    cached = last["cache_read_input_tokens"]
    assert first["cache_read_input_tokens"] == cached
    return last["input_tokens"] + last["cache_creation_input_tokens"] + cached, cached


def by_responses(server: RealServer, session: Session) -> tuple[int, int]:
    told = events(server, "/v1/responses", session.responses("tiny", 4))
    usage = told[-1]["response"]["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def replayed(server: RealServer, ask: Ask, seed: int, head: Head | None) -> list[tuple[int, int]]:
    session, turns = Session(seed, 0.4, head), []
    for _ in range(TURNS):
        turns.append(ask(server, session))
        session.step()
    return turns


@pytest.mark.parametrize(
    ("seed", "ask", "head"),
    [
        (1, by_messages, None),
        # Dropped, as in vLLM.
        (2, by_messages, billing),
        (4, by_responses, None),
    ],
)
def test_a_turn_reads_what_the_last_one_wrote(
    session_server: RealServer, seed: int, ask: Ask, head: Head | None
) -> None:
    turns = replayed(session_server, ask, seed, head)
    for (before, _), (length, cached) in pairwise(turns):
        assert cached >= before - GENERATION_PROMPT - UNIT
        assert cached / length > 0.85


@pytest.mark.parametrize(("seed", "ask"), [(6, by_messages), (7, by_responses)])
def test_a_changing_line_at_the_head_costs_all_hits(
    session_server: RealServer, seed: int, ask: Ask
) -> None:
    def nonce(turn: int) -> str:
        return f"{turn} of many"

    # What lies before it is the template's.
    assert all(cached <= 2 * UNIT for _, cached in replayed(session_server, ask, seed, nonce))


# ---------------------------------------------------------------------------------- logprobs server
CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LOGPROBS_TEXT = "漢é日 <b> ok😀x"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
END = 3
"""`<|im_end|>`, a special token."""
BYTES = list(range(4, 260))


def whole(server: RealServer, path: str, **body: Any) -> Any:
    answer = server.client.post(path, json={"model": "tiny", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(server: RealServer, path: str, **body: Any) -> list[dict[str, Any]]:
    return events(server, path, {"model": "tiny", "temperature": 0, "stream": True, **body})


def joined(entries: list[Any]) -> bytes:
    return b"".join(bytes(entry["bytes"]) for entry in entries)


def chat_entries(server: RealServer, **body: Any) -> tuple[str, list[Any], int]:
    """Return the text, the entries and the number of tokens of a chat; its stream has the same."""
    body = {"messages": [{"role": "user", "content": "Say"}], "logprobs": True, **body}
    answer = whole(server, CHAT, **body)
    choice = answer["choices"][0]
    text, entries = choice["message"]["content"], choice["logprobs"]["content"]
    chunks = [one for event in events_of(server, CHAT, **body) for one in event["choices"]]
    chunks = [chunk for chunk in chunks if chunk["index"] == 0]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == text
    streamed = [one for c in chunks if c["logprobs"] for one in c["logprobs"]["content"]]
    assert streamed == entries
    return text, entries, answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"top_logprobs": 2}, 1),
        ({"tools": CHAT_TOOLS, "top_logprobs": 1}, 1),
        ({"include_stop_str_in_output": True}, 1),
        ({"skip_special_tokens": False}, 1),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, 0),
        ({"stop": ["x"], "include_stop_str_in_output": True}, 0),
        ({"max_tokens": 3}, 0),
        ({"return_tokens_as_token_ids": True, "top_logprobs": 1}, 1),
        ({"use_beam_search": True, "n": 2, "max_tokens": 20}, None),
    ],
    ids=str,
)
def test_bytes_of_a_chat_are_its_text(
    server: RealServer, fields: dict[str, Any], missing: int | None
) -> None:
    if "use_beam_search" in fields:
        body = {"messages": [{"role": "user", "content": "漢字 😀"}], "logprobs": True, **fields}
        choices = whole(server, CHAT, **body)["choices"]
        pairs = [(one["message"]["content"], one["logprobs"]["content"]) for one in choices]
    else:
        text, entries, tokens = chat_entries(
            server, structured_outputs=say(LOGPROBS_TEXT), **fields
        )
        pairs = [(text, entries)]
        # Of the tokens that are billed, the one that ends an answer has no entry.
        assert missing is None or len(entries) == tokens - missing
    for text, entries in pairs:
        assert joined(entries).decode() == text
        for entry in entries:
            for one in (entry, *entry["top_logprobs"]):
                assert one["token"]
                assert one["bytes"]
                if not one["token"].startswith(("\\x", "token_id:")):
                    assert bytes(one["bytes"]).decode() == one["token"]


@pytest.mark.parametrize("stop", ["日", "é日 <"])
def test_a_stop_strings_tokens_have_entries(server: RealServer, stop: str) -> None:
    text, entries, tokens = chat_entries(server, structured_outputs=say(LOGPROBS_TEXT), stop=[stop])
    assert text == LOGPROBS_TEXT.partition(stop)[0]
    assert len(entries) == tokens
    assert joined(entries).startswith(text.encode())


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.wide) for n in range(4, 12))]
)
def test_bytes_that_are_no_characters(server: RealServer, seed: int) -> None:
    fields = {"allowed_token_ids": BYTES, "temperature": 1, "seed": seed, "max_tokens": 12}
    text, entries, _ = chat_entries(server, top_logprobs=3, **fields)
    assert joined(entries).decode(errors="replace").removesuffix("\ufffd") == text.removesuffix(
        "\ufffd"
    )
    assert all(one["token"] for entry in entries for one in (entry, *entry["top_logprobs"]))


def test_a_hidden_special_token_adds_no_bytes(server: RealServer) -> None:
    fields = {"allowed_token_ids": [END, *BYTES[60:90]], "ignore_eos": True, "max_tokens": 12}
    fields |= {"logit_bias": {str(END): 2}, "temperature": 1, "seed": 1}
    text, entries, tokens = chat_entries(server, **fields)
    assert len(entries) == tokens
    assert "<|im_end|>" in [entry["token"] for entry in entries]
    assert joined(entries).decode() == text


@pytest.mark.parametrize("tools", [{}, {"tools": [{"type": "function", **FUNCTION}]}])
def test_bytes_of_a_response_are_its_text(server: RealServer, tools: dict[str, Any]) -> None:
    fields = {"input": "Say", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    fields |= {"structured_outputs": say(LOGPROBS_TEXT), **tools}
    part = whole(server, RESPONSES, **fields)["output"][0]["content"][0]
    assert (part["text"], joined(part["logprobs"]).decode()) == (LOGPROBS_TEXT, LOGPROBS_TEXT)
    found = events_of(server, RESPONSES, **fields)
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [one for event in deltas for one in event["logprobs"]] == part["logprobs"]
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == part["logprobs"]


PROMPT_IDS = [1, 2, END, 539, 226, 4]
ECHOES: list[dict[str, Any]] = [
    {"prompt": "Hello, I'm a"},
    {"prompt": "Hello, I'm a", "add_special_tokens": False},
    {"prompt": "Hello, I'm a", "n": 2, "temperature": 1, "seed": 1},
    {"prompt": ["漢字 <|im_end|> 😀!", "b", " \n c"]},
    {"prompt": "<|startoftext|><|im_end|>"},
    {"prompt": PROMPT_IDS},
    {"prompt": [PROMPT_IDS, [539]]},
    {"prompt": "one two 漢字 three", "truncate_prompt_tokens": 5},
    {"prompt": "one two 漢字 three", "truncate_prompt_tokens": 5, "truncation_side": "left"},
    {"prompt": PROMPT_IDS, "truncate_prompt_tokens": 3, "truncation_side": "left"},
    {"prompt": "a", "allowed_token_ids": [END, *BYTES], "ignore_eos": True, "seed": 3},
    {"prompt": "a", "allowed_token_ids": [68, 249], "bad_words": ["aa"], "ignore_eos": True},
    {"prompt": "a", "stop": ["!"], "structured_outputs": say("b 漢!")},
    {"prompt": "a", "skip_special_tokens": False, "ignore_eos": True, "allowed_token_ids": [END]},
]


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("fields", ECHOES, ids=str)
def test_offsets_count_the_characters_before(
    server: RealServer, fields: dict[str, Any], echo: bool
) -> None:
    fields = {"max_tokens": 6, "logprobs": 1, "echo": echo, "return_token_ids": True, **fields}
    answer = whole(server, COMPLETION, **fields)
    echoed = prompt = billed = 0
    for choice in answer["choices"]:
        text, found = choice["text"], choice["logprobs"]
        starts = found["text_offset"]
        assert starts == sorted(starts)
        assert starts[:1] in ([], [0])
        for token, (begin, end) in zip(
            found["tokens"], pairwise([*starts, len(text)]), strict=True
        ):
            # A part of a character has the text that it completes, a hidden token none.
            assert (
                token == text[begin:end]
                or (token.startswith("<|") and begin == end)
                or "\\x" in token
                or begin >= len(text)
            ), (token, begin, end)
        echoed = len(choice["prompt_token_ids"]) if echo else 0
        ended = choice["finish_reason"] == "stop" and choice["stop_reason"] is None
        assert len(starts) == echoed + len(choice["token_ids"]) - ended
        if choice["index"] % fields.get("n", 1) == 0:
            prompt += len(choice["prompt_token_ids"])
        billed += len(choice["token_ids"])
    assert (prompt, billed) == (
        answer["usage"]["prompt_tokens"],
        answer["usage"]["completion_tokens"],
    )
    streamed: dict[int, dict[str, Any]] = {}
    for event in events_of(server, COMPLETION, **fields):
        for choice in event["choices"]:
            one = streamed.setdefault(choice["index"], {"text": "", "token_ids": []})
            one["text"] += choice["text"]
            one["token_ids"] += choice["token_ids"]
            for name, values in choice["logprobs"].items():
                one[name] = one.get(name, []) + values
    for choice in answer["choices"]:
        same = {name: choice[name] for name in ("text", "token_ids")} | choice["logprobs"]
        assert streamed[choice["index"]] == same


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": "Say hi"}, "Say hi"),
        ({"prompt": "one two three", "truncate_prompt_tokens": 2}, None),
        ({"prompt": "one two three", "truncate_prompt_tokens": 2, "truncation_side": "left"}, None),
        ({"prompt": [539, 540, 541], "truncate_prompt_tokens": 2}, None),
        ({"prompt": [END, 539]}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("most", "ids"),
    [
        (0, True),
        (3, False),
        pytest.param(0, False, marks=pytest.mark.wide),
        pytest.param(3, True, marks=pytest.mark.wide),
    ],
)
def test_the_echoed_prompt_is_what_the_model_reads(
    server: RealServer, fields: dict[str, Any], text: str | None, most: int, ids: bool
) -> None:
    shown = {**fields, "echo": True, "max_tokens": most, "return_token_ids": True}
    read = whole(server, COMPLETION, **shown)["choices"][0]["prompt_token_ids"]
    kept = [token for token in read if token != 1]
    if text is None:
        text = server.client.post("/detokenize", json={"model": "tiny", "tokens": kept}).json()[
            "prompt"
        ]
    fields = {**fields, "max_tokens": most, "return_token_ids": ids}
    rest = "" if not most else whole(server, COMPLETION, **fields)["choices"][0]["text"]
    answer = whole(server, COMPLETION, **fields, echo=True)
    choice = answer["choices"][0]
    assert choice["text"] == text + rest
    assert choice["token_ids"] == ([] if not most else choice["token_ids"]) if ids else True
    assert answer["usage"]["completion_tokens"] == most
    assert answer["usage"]["prompt_tokens"] == len(read)
    streamed = events_of(server, COMPLETION, **fields, echo=True)
    assert "".join(one["text"] for event in streamed for one in event["choices"]) == text + rest


LONG = "word " * CONTEXT


@pytest.mark.parametrize(
    ("kept", "side"),
    [
        *((kept, {}) for kept in (-1, CONTEXT, CONTEXT - 1, CONTEXT - 2)),
        (CONTEXT - 1, {"truncation_side": "left"}),
        (CONTEXT - 2, {"truncation_side": "right"}),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        (COMPLETION, {"prompt": LONG}),
        (COMPLETION, {"prompt": [539] * (CONTEXT + 50)}),
        (COMPLETION, {"prompt": LONG, "echo": True}),
    ],
    ids=["chat", "text", "ids", "echo"],
)
def test_a_cut_prompt_leaves_room_for_a_token(
    server: RealServer, path: str, body: dict[str, Any], side: dict[str, Any], kept: int
) -> None:
    usage = whole(server, path, **body, **side, truncate_prompt_tokens=kept)["usage"]
    # An answer of completions has 16 tokens, if nothing is said.
    most = CONTEXT - (1 if path == CHAT or kept > 0 else 16)
    assert usage["prompt_tokens"] == (min(kept, most) if kept > 0 else most)
    assert usage["completion_tokens"] >= 1


def test_a_truncated_response_has_room_for_a_token(server: RealServer) -> None:
    fields = {"input": LONG, "truncation": "auto"}
    assert whole(server, RESPONSES, **fields)["usage"]["input_tokens"] == CONTEXT - 1
    counted = server.client.post(f"{RESPONSES}/input_tokens", json={"model": "tiny", **fields})
    assert counted.json()["input_tokens"] == CONTEXT - 1
