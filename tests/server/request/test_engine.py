"""Requests to a real engine that once ended or held the server, or were answered with a 500."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer, until

pytestmark = pytest.mark.engine

TEMPLATE = """\
{{- bos_token }}{{ greeting or "" }}
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\\n" + (message.content or "") + "<|im_end|>\\n" }}
{%- endfor %}
{%- if slow %}
    {%- for a in messages %}{% for b in messages %}{% for c in messages %}
    {%- endfor %}{% endfor %}{% endfor %}
{%- endif %}
{%- if long %}
    {%- for a in messages %}{% for b in messages %}{{ b.content }}{% endfor %}{% endfor %}
{%- endif %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""
DOUBLING = """\
{%- set all = namespace(text="aaaaaaaa") %}
{%- for _ in range(40) %}{% set all.text = all.text ~ all.text %}{% endfor %}{{ all.text }}
"""
USER: Any = {"role": "user", "content": "hi"}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ALLOWED, STOPS = "allowed_token_ids", "stop_token_ids"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 2},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [USER], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/tokenize": {"messages": [USER]},
}
TEMPLATED = sorted(BODIES.keys() - {COMPLETIONS})


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("s")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ("--chat-template", str(template), "--trust-request-chat-template")
    flags += ("--max-model-len", "1024", "--max-logprobs", "-1")
    flags += ("--data-dir", str(folder / "data"), "--min-free-bytes", "0")
    with RealServer(checkpoints("llama", dtype="float32"), folder, *flags) as up:
        up.until_ready()
        yield up


def post(server: RealServer, path: str, **fields: Any) -> httpx.Response:
    return server.client.post(path, json={"model": "tiny", **BODIES[path], **fields})


def code(answer: httpx.Response) -> str:
    assert answer.status_code != 200, answer.text
    return str(answer.json()["error"]["code"])


@pytest.mark.parametrize("path", TEMPLATED)
@pytest.mark.parametrize(
    "name", ["tokenize", "padding", "max_length", "tokenizer_kwargs", "return_tensors", "bos_token"]
)
def test_arguments_of_the_tokenizer_do_not_reach_it(
    server: RealServer, path: str, name: str
) -> None:
    values = {"tokenize": True, "padding": "max_length", "max_length": 100_000_000, name: 1}
    answer = post(server, path, chat_template_kwargs={name: values[name]})
    assert answer.status_code == 400
    assert code(answer) == "unsupported_field"
    assert answer.json()["error"]["param"] == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("path", TEMPLATED)
def test_variables_of_the_template_do(server: RealServer, path: str) -> None:
    def length(**fields: Any) -> int:
        answer = post(server, path, **fields).json()
        usage = answer.get("usage", answer)
        counts = ("prompt_tokens", "input_tokens", "count", "cache_creation_input_tokens")
        return sum(usage.get(name) or 0 for name in (*counts, "cache_read_input_tokens"))

    greeting = {"greeting": "one two three four five six seven"}
    assert length(chat_template_kwargs=greeting) > length() + 5
    answer = post(server, path, chat_template_kwargs={"enable_thinking": False})
    assert answer.status_code == 200
    assert answer.headers["x-rbln-ignored-fields"] == "chat_template_kwargs.enable_thinking"


@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs", "documents"])
def test_what_the_model_cannot_show_is_refused(server: RealServer, field: str) -> None:
    value: Any = [{"text": "a"}] if field == "documents" else {"image": {"max_length": 10**9}}
    answer = post(server, CHAT, **{field: value})
    assert (answer.status_code, code(answer)) == (400, "unsupported_field")
    assert answer.json()["error"]["param"] == field


def test_a_slow_template_holds_up_nobody(server: RealServer) -> None:
    with ThreadPoolExecutor(1) as other:
        many = {"messages": [USER] * 800, "chat_template_kwargs": {"slow": True}}
        slow = other.submit(post, server, CHAT, **many)
        answered = 0
        while not slow.done():
            assert post(server, CHAT).status_code == 200
            answered += not slow.done()
    answer = slow.result()
    assert (answer.status_code, code(answer)) == (400, "invalid_value")
    assert "longer than 3 s" in answer.text
    assert answered


@pytest.mark.parametrize(
    ("fields", "statuses"),
    [
        ({"messages": [{**USER, "content": "x" * 200}] * 300}, {400}),
        # On a busy machine it takes too long before it takes too much.
        ({"chat_template": DOUBLING}, {400, 413}),
        ({"chat_template": "{% for a in messages %}{{ unheard.of }}{% endfor %}"}, {400}),
    ],
)
def test_what_a_template_makes_is_bounded(
    server: RealServer, fields: dict[str, Any], statuses: set[int]
) -> None:
    own = {} if "chat_template" in fields else {"chat_template_kwargs": {"long": True}}
    for path in (CHAT, "/tokenize"):
        answer = post(server, path, **fields, **own)
        assert answer.status_code in statuses, answer.text[:500]
        assert len(answer.content) < 1000
    assert post(server, CHAT).status_code == 200


def test_logprobs_of_long_prompts_are_those_of_vllm(server: RealServer) -> None:
    prompt = "one two three " * 200
    wish: dict[str, Any] = {"prompt": prompt, "temperature": 0}
    few = post(server, COMPLETIONS, **wish, echo=True, logprobs=1).json()["choices"][0]
    many = post(server, COMPLETIONS, **wish, echo=True, logprobs=20).json()["choices"][0]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert many["logprobs"][name] == few["logprobs"][name]
    assert len(many["logprobs"]["top_logprobs"][-1]) >= 20
    several = {"n": 2, "seed": 1, "temperature": 1, "prompt_logprobs": 20}
    asked = post(server, COMPLETIONS, **{**wish, **several})
    for choice in asked.json()["choices"]:
        assert choice["prompt_logprobs"] == many["prompt_logprobs"]
    body = {"model": "tiny", "messages": [{**USER, "content": prompt}], "prompt_logprobs": 20}
    chat = server.client.post(CHAT, json={**body, "max_tokens": 1}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(position) >= 20 for position in chat["prompt_logprobs"][1:])
    streamed = post(server, COMPLETIONS, **wish, echo=True, logprobs=20, stream=True).text
    frames = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    tokens = [token for frame in frames for token in frame["choices"][0]["logprobs"]["tokens"]]
    assert tokens == many["logprobs"]["tokens"]


def test_an_answer_has_a_bounded_number_of_logprobs(server: RealServer) -> None:
    answer = post(server, COMPLETIONS, prompt="one " * 500, prompt_logprobs=-1)
    assert (answer.status_code, code(answer)) == (400, "invalid_value")
    assert answer.json()["error"]["param"] == "prompt_logprobs"
    assert "1000000" in answer.text
    assert post(server, COMPLETIONS, prompt="one", prompt_logprobs=-1).status_code == 200


def test_alternatives_are_the_most_likely_tokens(server: RealServer) -> None:
    wish: dict[str, Any] = {"temperature": 2.0, "seed": 3, "max_tokens": 20}
    chat = post(server, CHAT, **wish, logprobs=True, top_logprobs=3).json()
    included = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    wish = {"temperature": 2.0, "max_output_tokens": 20}
    response = post(server, RESPONSES, **wish, **included).json()
    content = chat["choices"][0]["logprobs"]["content"]
    content += response["output"][0]["content"][0]["logprobs"]
    assert len(content) == 40
    for token in content:
        likely = [one["logprob"] for one in token["top_logprobs"]]
        assert len(likely) == 3
        assert likely == sorted(likely, reverse=True)
        assert token["logprob"] <= likely[0]
    assert any(token["logprob"] < token["top_logprobs"][-1]["logprob"] for token in content)


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [300], "response_format": {"type": "json_object"}}, ALLOWED),
        ({"allowed_token_ids": [300], "response_format": SCHEMA}, ALLOWED),
        ({"allowed_token_ids": [300], "structured_outputs": {"regex": "[0-9]"}}, ALLOWED),
        ({"bad_words": ["a", "b"], "structured_outputs": {"choice": ["a", "b"]}}, "bad_words"),
        ({"stop_token_ids": [97], "structured_outputs": {"regex": "~{3}"}}, STOPS),
        ({"stop_token_ids": [97], "structured_outputs": {"grammar": 'root ::= "~~"'}}, STOPS),
        (
            {
                "stop_token_ids": [97],
                "structured_outputs": {"choice": ["~"]},
                "logit_bias": {"5": 9},
            },
            STOPS,
        ),
        ({"allowed_token_ids": [3], "min_tokens": 2}, ALLOWED),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_constraints_that_exclude_each_other_are_refused(
    server: RealServer, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = post(server, CHAT, **fields, stream=stream, max_tokens=8)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["", "x"], "echo": True}, "prompt[0]"),
        ({"use_beam_search": True, "logprobs": 1, "echo": True}, "echo"),
        ({"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"vllm_xargs": {"kv_cache_report_mode": "full"}}, "vllm_xargs"),
        ({"prompt": [5] * 1024}, "prompt"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_what_ended_in_a_500_is_refused_by_name(
    server: RealServer, fields: dict[str, Any], param: str
) -> None:
    answer = post(server, COMPLETIONS, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_several_echoed_answers_are_streamed(server: RealServer) -> None:
    wish: dict[str, Any] = {"prompt": ["word " * 60] * 2, "n": 2, "echo": True, "temperature": 1}
    streamed = post(server, COMPLETIONS, **wish, logprobs=1, stream=True).text
    frames = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert not any("error" in frame for frame in frames), streamed[-500:]
    texts = ["", "", "", ""]
    for frame in frames:
        for choice in frame["choices"]:
            texts[choice["index"]] += choice["text"]
    # The sampled end may be a special token, which has no text.
    assert all(text.startswith("word " * 59) for text in texts), texts


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, "/v1/messages"])
@pytest.mark.parametrize("limit", [None, 7])
def test_the_error_of_a_long_prompt_has_its_length(
    server: RealServer, path: str, limit: int | None
) -> None:
    words = "one two three " * 500
    name = next(name for name in ("messages", "prompt", "input") if name in BODIES[path])
    fields: dict[str, Any] = {name: words if name != "messages" else [{**USER, "content": words}]}
    counted = server.client.post("/tokenize", json={"model": "tiny", "prompt": words}).json()
    names = {RESPONSES: "max_output_tokens"}
    body = {key: value for key, value in BODIES[path].items() if not key.startswith("max_")}
    if limit is not None or path == "/v1/messages":
        fields[names.get(path, "max_tokens")] = limit or 7
    error = server.client.post(path, json={"model": "tiny", **body, **fields}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    length = int(re.search(r"(\d+) tokens", error["message"])[1])  # type: ignore[index]
    assert counted["count"] <= length <= counted["count"] + 40
    if path != "/v1/messages":
        assert "1024 tokens" in error["message"]
        assert ("takes 7" in error["message"]) == (limit is not None)


def test_a_prompt_too_long_to_be_tokenized_is_measured_in_characters(server: RealServer) -> None:
    body = {"model": "tiny", "max_tokens": 7, "messages": [{**USER, "content": "a b " * 20_000}]}
    error = server.client.post("/v1/messages", json=body).json()["error"]
    assert re.match(r"prompt is too long: at least \d+ tokens > 1023 maximum", error["message"])
    error = server.client.post(CHAT, json=body).json()["error"]
    assert re.match(r"The prompt has 80\d{3} characters; ", error["message"])


def test_a_response_has_an_id_of_the_server(server: RealServer) -> None:
    for _ in range(2):
        answer = post(server, RESPONSES, request_id="a/b", store=True)
        assert answer.status_code == 200
        assert answer.headers["x-rbln-ignored-fields"] == "request_id"
        made = answer.json()["id"]
        assert made.startswith("resp_")
        assert server.client.get(f"/v1/responses/{made}").status_code == 200


FORGED = "x\n12:00:00 INFO    server.service: all is well\x1b[2J"


def test_clients_write_nothing_into_the_log(server: RealServer) -> None:
    before = len(server.log.read_bytes())
    for stream in (False, True):
        for fields in (
            {"messages": [{"role": FORGED, "content": "secret"}]},
            {"messages": [{"role": "secret " * 100_000, "content": "a"}]},
            {"messages": [{**USER, "content": "secret " * 2000}]},
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "a",
                                "type": "function",
                                "function": {"name": FORGED, "arguments": "{"},
                            }
                        ],
                    }
                ]
            },
            {"chat_template_kwargs": {FORGED: 1}},
            {"chat_template": "{{ raise_exception(messages[0].content) }}" + FORGED},
            {"response_format": {"type": "json_schema", "json_schema": {"secret": 1}}},
            {FORGED: 1},
        ):
            assert post(server, CHAT, **fields, stream=stream).status_code in (200, 400)
    written = server.log.read_bytes()[before:].decode()
    assert "secret" not in written
    assert "\x1b" not in written and "all is well" not in written
    assert "Traceback" not in written
    ours = (" POST /v1/chat/completions ", " server.host.job_pool: process ")
    lines = [line for line in written.splitlines() if not any(words in line for words in ours)]
    assert lines == [], lines


@pytest.mark.parametrize(
    ("path", "field", "value", "param"),
    [
        (CHAT, "messages", [{**USER, "surprise": 1}], "messages[0].surprise"),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}],
         "messages[0].content[0].x"),
        ("/tokenize", "messages", [{**USER, "surprise": 1}], "messages[0].surprise"),
        (RESPONSES, "input", [{**USER, "surprise": 1}], "input[0].surprise"),
        (RESPONSES, "input", [{"type": "function_call_output", "call_id": "c", "output": "d",
                               "surprise": 1}], "input[0].surprise"),
        ("/v1/messages", "messages", [{**USER, "surprise": 1}], "messages[0].surprise"),
    ],
)  # fmt: skip
def test_unknown_fields_within_are_refused(
    server: RealServer, path: str, field: str, value: Any, param: str
) -> None:
    answer = post(server, path, **{field: value})
    assert (answer.status_code, code(answer)) == (400, "unknown_field")
    assert answer.json()["error"]["param"] == param
    assert "--unknown-fields warn" in answer.text


def test_an_answer_can_be_sent_back_as_it_is(server: RealServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    chat = client.chat.completions.create(model="tiny", messages=[USER], max_tokens=3)
    turns: list[Any] = [USER, chat.choices[0].message, USER]
    assert client.chat.completions.create(model="tiny", messages=turns, max_tokens=3).choices
    message = chat.choices[0].message.model_dump() | {"reasoning_content": "a", "annotations": [{}]}
    again = client.chat.completions.with_raw_response.create(
        model="tiny", messages=[USER, message, USER], max_tokens=3
    )
    assert again.headers["x-rbln-ignored-fields"] == "messages[].annotations"
    response = client.responses.create(model="tiny", input="hi", max_output_tokens=3)
    items: list[Any] = [USER, *response.output, USER]
    assert client.responses.create(model="tiny", input=items, max_output_tokens=3).output


def test_a_real_engine_forgets_its_prompts(server: RealServer) -> None:
    body = {"model": "tiny", "prompt": "one two three four " * 20, "max_tokens": 2}

    def cached() -> int:
        usage = server.client.post("/v1/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert server.client.post("/reset_prefix_cache").json() == {"success": True}
    assert cached() == 0


OPEN = "\ufffd"
HIDDEN = {"role": "system", "content": "TOP-SECRET: swordfish."}
ASK, OPENED = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": OPEN}
ITEM = {"type": "message", "id": "m", "role": "assistant", "status": "incomplete"}
PART = {"type": "output_text", "text": OPEN, "annotations": []}
CONTINUED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": f"The secret is swordfish{OPEN}"},
    CHAT: {
        "messages": [HIDDEN, ASK, OPENED],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "/v1/messages": {"system": HIDDEN["content"], "messages": [ASK, OPENED]},
    "/v1/responses": {
        "instructions": HIDDEN["content"],
        "input": [ASK, {**ITEM, "content": [PART]}],
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CONTINUED)
def test_no_text_of_a_prompt_is_returned(server: RealServer, path: str, stream: bool) -> None:
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": "tiny", most: 16, "stream": stream, **CONTINUED[path]}
    answer = server.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if path == "/v1/responses":
        # The response repeats its own instructions, as in OpenAI's API.
        answered = answer.text.replace(json.dumps(HIDDEN["content"]), "")
    else:
        answered = answer.text
    assert "swordfish" not in answered


def test_token_ids_that_end_inside_a_character_are_continued(server: RealServer) -> None:
    prompt = "The weather is fine, and 漢"
    ids = server.client.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    for cut in (1, 2):
        body = {"model": "tiny", "prompt": ids[:-cut], "max_tokens": cut, "temperature": 0}
        wanted = {str(token): 100.0 for token in ids[-cut:]}
        tokens = server.client.post("/v1/completions", json={**body, "logit_bias": wanted}).json()
        text = tokens["choices"][0]["text"]
        assert "weather" not in text
        assert len(text) <= cut


OF_OTHER_CLIENTS: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": {"type": "enabled"}},
    "options": {"options": {"num_ctx": 8}},
    "chat_id": {"chat_id": "1", "provider": {"order": []}, "think": True},
    "tools": {"tools": []},
    "null": {"xyz": None, "tools": None, "stop": None, "n": None, "top_logprobs": None},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", OF_OTHER_CLIENTS.values(), ids=OF_OTHER_CLIENTS)
def test_fields_of_other_clients_change_nothing(
    server: RealServer, fields: dict[str, Any], stream: bool
) -> None:
    plain = post(server, CHAT, temperature=0)
    answer = post(server, CHAT, temperature=0, stream=stream, **fields)
    assert answer.status_code == 200, answer.text
    if not stream:
        assert answer.json()["choices"][0]["message"] == plain.json()["choices"][0]["message"]
    ignored = set(answer.headers.get("x-rbln-ignored-fields", "").replace(" ", "").split(","))
    assert ignored - {""} == {name for name in fields if name not in ("tools", *BODY_FIELDS)}


BODY_FIELDS = ("stop", "n", "top_logprobs")


@pytest.mark.parametrize("stream", [False, True])
def test_null_does_not_turn_logprobs_off(server: RealServer, stream: bool) -> None:
    answer = post(server, CHAT, logprobs=True, top_logprobs=None, stream=stream)
    assert '"logprob":' in answer.text
    messages = [USER, {**USER, "id": "1", "is_error": True}]
    answer = post(server, CHAT, messages=messages, stream=stream)
    assert answer.headers["x-rbln-ignored-fields"] == "messages[].id, messages[].is_error"


# ------------------------------------------------------------------------------------- tiers server
SHORT_CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("requested", "used"),
    [("auto", "default"), ("default", "default"), ("flex", "flex"), ("priority", "priority")],
)
def test_answers_say_which_tier_it_was(client: openai.OpenAI, requested: Any, used: str) -> None:
    chat = client.chat.completions.create(**SHORT_CHAT, max_tokens=3, service_tier=requested)
    assert chat.service_tier == used
    chunks = list(
        client.chat.completions.create(
            **SHORT_CHAT, max_tokens=3, service_tier=requested, stream=True
        )
    )
    assert {chunk.service_tier for chunk in chunks} == {used}
    response = client.responses.create(
        model="tiny", input="a", max_output_tokens=3, service_tier=requested
    )
    assert response.service_tier == used
    events = client.responses.create(
        model="tiny", input="a", max_output_tokens=3, service_tier=requested, stream=True
    )
    shown = {event.response.service_tier for event in events if hasattr(event, "response")}
    assert shown == {used}
    for stream in (False, True):
        text = client.post(
            "/completions",
            body={"model": "tiny", "prompt": "a", "max_tokens": 3, "service_tier": requested}
            | {"stream": stream},
            cast_to=str,
        )
        assert f'"service_tier":"{used}"' in text


def test_requests_without_a_tier_get_no_field(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**SHORT_CHAT, max_tokens=3, stream=True))
    assert {chunk.service_tier for chunk in chunks} == {None}


def test_anthropics_tiers(server: RealServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    for requested in ("auto", "standard_only"):
        message = client.messages.create(**SHORT_CHAT, max_tokens=3, service_tier=requested)  # type: ignore[call-overload]
        assert message.usage.service_tier == "standard"
    with client.messages.stream(**SHORT_CHAT, max_tokens=3) as stream:
        assert stream.get_final_message().usage.service_tier == "standard"


def test_flex_gives_way(server: RealServer, client: openai.OpenAI) -> None:
    """Four rows: what is flex has them all, and loses what clients need."""

    def ask(number: int, tier: str, tokens: int) -> str:
        answer = client.completions.create(
            model="tiny",
            prompt=[3 + number, 7, 9],
            max_tokens=tokens,
            temperature=0,
            extra_body={"ignore_eos": True, "service_tier": tier},
        )
        ended.append(tier)
        return answer.choices[0].text

    def ask_behind(number: int) -> None:
        chunks = client.completions.create(
            model="tiny",
            prompt=[3 + number, 7, 9],
            max_tokens=200,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "service_tier": "flex"},
        )
        text = ""
        for chunk in chunks:
            began.set()
            text += chunk.choices[0].text
        ended.append("flex")
        texts[number] = text

    began = threading.Event()
    ended: list[str] = []
    alone = [ask(number, "default", 200) for number in range(4)]
    ended.clear()
    texts: dict[int, str] = {}
    behind = [threading.Thread(target=ask_behind, args=(number,)) for number in range(4)]
    for thread in behind:
        thread.start()
    assert began.wait(60)
    # A step takes less time than a request of a busy machine: none runs until all are there.
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    front = [threading.Thread(target=ask, args=(4 + n, "default", 40)) for n in range(4)]
    for thread in front:
        thread.start()
    try:
        until(lambda: server.metric("rbln_serve_in_flight_requests") == 8)
    finally:
        os.kill(engine, signal.SIGCONT)
    for thread in front + behind:
        thread.join()
    assert ended[:4] == ["default"] * 4, "they came later, and no row of theirs was taken"
    assert [texts[number] for number in range(4)] == alone
    assert server.metric("rbln_recompiles_after_warmup_total") == 0
