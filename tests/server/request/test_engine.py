"""Requests to a real engine that once ended or held the server, or were answered with a 500."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer

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
USER = {"role": "user", "content": "hi"}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
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
    flags += ("--read-timeout-s", "5", "--data-dir", str(folder / "data"), "--min-free-bytes", "0")
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
            answered += 1
    answer = slow.result()
    assert (answer.status_code, code(answer)) == (429, "overloaded")
    assert "--read-timeout-s" in answer.text
    assert answered > 3


@pytest.mark.parametrize(
    ("fields", "statuses"),
    [
        ({"messages": [{**USER, "content": "x" * 200}] * 300}, {400}),
        # On a busy machine it takes too long before it takes too much.
        ({"chat_template": DOUBLING}, {413, 429}),
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
