"""The real server over a tiny model: every route, with the official client where it has one."""

import itertools
import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.checkpoints import CheckpointCache
from tests.multimodal_checkpoints import make_multimodal_checkpoint
from tests.server.real_server import RealServer, until
from tests.server.routes.test_routes import traffic_of_the_last_minutes, whole_description

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
# The server keeps blocks of 16 tokens, so of 100 shared tokens 96 lie in whole blocks.
SHARED, HIT = 100, 96
HITS = "vllm:prefix_cache_hits_total"
QUERIES = "vllm:prefix_cache_queries_total"


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    with RealServer(checkpoints("llama", dtype="float32"), tmp_path_factory.mktemp("s")) as up:
        up.until_ready()
        yield up


def test_warm_up_was_reported(server: RealServer) -> None:
    body = server.client.get("/readyz").json()
    assert body["graphs"]["done"] == body["graphs"]["total"] > 0
    assert server.metric("rbln_serve_warmup_graphs_done") == body["graphs"]["total"]
    assert server.metric('rbln_serve_phase{phase="ready"}') == 1
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/startupz").status_code == 200


def test_the_server_describes_itself(server: RealServer) -> None:
    whole_description(server)
    traffic_of_the_last_minutes(server)


def test_messages(server: RealServer) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 4}
    answer = server.client.post("/v1/messages", json=body).json()
    assert answer["type"] == "message"
    assert answer["usage"]["output_tokens"] == 4
    stream = server.client.post("/v1/messages", json={**body, "stream": True}).text
    assert stream.startswith("event: message_start\n")
    assert "event: message_stop\n" in stream
    count = server.client.post(
        "/v1/messages/count_tokens", json={"model": "tiny", "messages": HI}
    ).json()
    assert count["input_tokens"] == whole_input(answer["usage"])


def test_tokens_there_and_back(server: RealServer) -> None:
    tokens = server.client.post(
        "/tokenize", json={"prompt": "hello world", "add_special_tokens": False}
    ).json()
    text = server.client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert text["prompt"] == "hello world"
    assert tokens["max_model_len"] == 256
    chat = server.client.post("/tokenize", json={"messages": HI}).json()
    assert chat["count"] > tokens["count"]


LONG = [{"role": "user", "content": "a b c " * 400}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
PICTURE = [{"role": "user", "content": [IMAGE]}]
MANY_LOGPROBS = {"logprobs": True, "top_logprobs": 21}
NO_ANSWER = ("max_completion_tokens", "max_output_tokens")
BEAMS, PENALTY = {"use_beam_search": True}, "length_penalty"
ERRORS: list[tuple[str, dict[str, Any], int, str, str | None]] = [
    (CHAT, {}, 400, "missing_field", "messages"),
    (CHAT, {"messages": []}, 400, "invalid_value", "messages"),
    (CHAT, {"messages": "hi"}, 400, "invalid_type", "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "missing_field", "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "invalid_type", None),
    (CHAT, {"messages": HI, "max_tokens": "5"}, 400, "invalid_type", "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 257}, 400, "context_length_exceeded", "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 250}, 400, "context_length_exceeded", "messages"),
    (CHAT, {"messages": LONG}, 400, "context_length_exceeded", "messages"),
    (CHAT, {"messages": HI, "temperature": "hot"}, 400, "invalid_type", "temperature"),
    (CHAT, {"messages": HI, "temperature": -1}, 400, "invalid_value", "temperature"),
    (CHAT, {"messages": HI, "top_p": 2}, 400, "invalid_value", "top_p"),
    (CHAT, {"messages": HI, "n": 5}, 400, "invalid_value", "n"),
    (CHAT, {"messages": HI, "xyz": 1}, 400, "unknown_field", "xyz"),
    (CHAT, {"messages": HI, "guided_json": {}}, 400, "unknown_field", "guided_json"),
    (CHAT, {"messages": HI, "stop": ["x"] * 9}, 400, "invalid_value", "stop"),
    (CHAT, {"messages": HI, "top_logprobs": 3}, 400, "invalid_value", "top_logprobs"),
    (CHAT, {"messages": HI, **MANY_LOGPROBS}, 400, "invalid_value", "top_logprobs"),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, 400, "invalid_value", NO_ANSWER[0]),
    (CHAT, {"messages": HI, **BEAMS, "length_penalty": -999}, 400, "invalid_value", PENALTY),
    (CHAT, {"messages": HI, "top_k": 2**64}, 400, "invalid_value", "top_k"),
    (CHAT, {"messages": HI, "priority": 1}, 400, "unsupported_field", "priority"),
    (CHAT, {"messages": HI, "model": "other"}, 404, "model_not_found", "model"),
    (
        CHAT,
        {"messages": HI, "response_format": {"type": "bogus"}},
        400,
        "invalid_value",
        "response_format.type",
    ),
    (CHAT, {"messages": PICTURE}, 400, "unsupported_field", "messages[0].content[0]"),
    ("/v1/embeddings", {"input": "a"}, 400, "unsupported_operation", None),
    ("/rerank", {"query": "a", "documents": ["b"]}, 400, "unsupported_operation", None),
    ("/v1/completions", {}, 400, "invalid_value", "prompt"),
    ("/v1/completions", {"prompt": ""}, 400, "invalid_value", "prompt"),
    ("/v1/completions", {"prompt": [1, 10**6]}, 400, "invalid_value", "prompt[1]"),
    ("/v1/completions", {"prompt": [5] * 256}, 400, "context_length_exceeded", "prompt"),
    ("/v1/completions", {"prompt": "a", "logprobs": 21}, 400, "invalid_value", "logprobs"),
    ("/v1/responses", {"input": "hi", "top_logprobs": 21}, 400, "invalid_value", "top_logprobs"),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 0}, 400, "invalid_value", NO_ANSWER[1]),
    ("/v1/responses", {}, 400, "missing_field", "input"),
    ("/v1/responses", {"input": "hi", "store": True}, 400, "unsupported_field", "store"),
    ("/v1/responses", {"input": "a b c " * 400}, 400, "context_length_exceeded", "input"),
    ("/v1/messages", {"messages": HI, "max_tokens": 1}, 400, "missing_field", "model"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "status", "code", "param"), ERRORS)
def test_bad_requests_are_refused_before_the_first_byte(
    server: RealServer,
    path: str,
    body: dict[str, Any],
    status: int,
    code: str,
    param: str | None,
    stream: bool,
) -> None:
    answer = server.client.post(path, json={**body, "stream": stream})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code, error
    assert param is None or error["param"] == param
    assert error["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_aborts_in_the_engine(server: RealServer, stream: bool) -> None:
    body = {"prompt": ["a"] * 8, "max_tokens": 240, "ignore_eos": True, "stream": stream, "n": 4}
    content = json.dumps(body).encode()
    before = server.metric("vllm:generation_tokens_total")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(content), content)
        )
        if stream:
            connection.recv(1000)
        else:
            until(lambda: server.metric("rbln_serve_in_flight_requests") >= 1)
    until(lambda: server.metric("rbln_serve_in_flight_requests") == 0)
    answer = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 200
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:generation_tokens_total") - before < 32 * 240
    aborted = 'rbln_http_requests_total{code="%s",method="POST",outcome="aborted"'
    assert server.metric(aborted % ("200" if stream else "499")) >= 1


def test_the_metrics_page_has_all_three_sources(server: RealServer) -> None:
    page = server.client.get("/metrics").text
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"}' in page
    assert "rbln_serve_build_info{" in page
    assert 'rbln_bucket_steps_total{bucket="1",phase="decode"}' in page
    assert server.metric("rbln_recompiles_after_warmup_total") == 0


_seeds = itertools.count()


def new_prefix() -> list[int]:
    """Tokens that no other test of this module has sent."""
    rng = random.Random(next(_seeds))
    return [rng.randrange(10, 500) for _ in range(SHARED)]


def complete(
    client: openai.OpenAI, prompt: list[int], *, stream: bool = False, **extra: Any
) -> int | None:
    """The cached tokens that one completion reports."""
    wish: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "extra_body": extra}
    if stream:
        options = {"include_usage": True}
        chunks = client.completions.create(**wish, stream=True, stream_options=options)
        usage = list(chunks)[-1].usage
    else:
        usage = client.completions.create(**wish).usage
    assert usage.prompt_tokens == len(prompt)
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_of_completions(client: openai.OpenAI, stream: bool) -> None:
    prefix = new_prefix()
    assert complete(client, [*prefix, 11, 12], stream=stream) == 0
    assert complete(client, [*prefix, 13, 14, 15], stream=stream) == HIT


def chat_usage(client: openai.OpenAI, system: str, user: str, *, stream: bool) -> Any:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    wish: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 2}
    if not stream:
        return client.chat.completions.create(**wish).usage
    options = {"include_usage": True}
    chunks = client.chat.completions.create(**wish, stream=True, stream_options=options)
    return list(chunks)[-1].usage


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_of_chats(client: openai.OpenAI, stream: bool) -> None:
    system = f"{stream} " + "abc " * 40
    first = chat_usage(client, system, "one", stream=stream)
    second = chat_usage(client, system, "two", stream=stream)
    # The template begins alike for everybody; what differs starts within the first blocks.
    assert first.prompt_tokens_details.cached_tokens <= 16
    saved = second.prompt_tokens_details.cached_tokens
    assert saved % 16 == 0
    assert second.prompt_tokens // 2 < saved < second.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_of_responses(client: openai.OpenAI, stream: bool) -> None:
    def cached(tail: str) -> int:
        text = f"{stream} " + "xyz " * 40 + tail
        wish: dict[str, Any] = {"model": "tiny", "input": text, "max_output_tokens": 2}
        if stream:
            last: Any = list(client.responses.create(**wish, stream=True))[-1]
            assert last.type == "response.incomplete"
            return int(last.response.usage.input_tokens_details.cached_tokens)
        answer: Any = client.responses.create(**wish, store=False)
        return int(answer.usage.input_tokens_details.cached_tokens)

    assert cached("one") <= 16
    assert cached("two") > 64


def whole_input(usage: dict[str, int]) -> int:
    """All tokens of a prompt: Anthropic counts what was read from or written to a cache apart."""
    cached = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    return usage["input_tokens"] + cached


def test_cached_tokens_of_messages(server: RealServer) -> None:
    def usage(user: str) -> dict[str, int]:
        messages = [{"role": "user", "content": "m " * 100 + user}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 2}
        answer = server.client.post("/v1/messages", json=body).json()
        result: dict[str, int] = answer["usage"]
        return result

    first, second = usage("one"), usage("two")
    assert second["cache_read_input_tokens"] > 64
    assert whole_input(second) == whole_input(first)


def test_a_salt_shares_with_itself_alone(client: openai.OpenAI) -> None:
    prompt = [*new_prefix(), 11]
    assert complete(client, prompt, cache_salt="tenant a") == 0
    assert complete(client, prompt, cache_salt="tenant a") == HIT
    assert complete(client, prompt, cache_salt="tenant b") == 0
    assert complete(client, prompt) == 0
    assert complete(client, prompt) == HIT


def test_metrics_count_the_same_cached_tokens(client: openai.OpenAI, server: RealServer) -> None:
    prefix = new_prefix()
    hits, queries = server.metric(HITS), server.metric(QUERIES)
    reported = [complete(client, [*prefix, token]) for token in (11, 12, 13)]
    assert reported == [0, HIT, HIT]
    assert server.metric(HITS) - hits == 2 * HIT
    assert server.metric(QUERIES) - queries == 3 * (SHARED + 1)


@pytest.mark.parametrize(
    ("flags", "shown"), [([], True), (["--no-enable-prompt-tokens-details"], False)]
)
def test_vllms_flag_can_leave_cached_tokens_out(flags: list[str], shown: bool) -> None:
    from server.settings import ServerSettings
    from server.vllm.flags import parse_arguments

    args = parse_arguments(["some/model", *flags], ServerSettings())
    assert args.enable_prompt_tokens_details is shown


def test_a_long_prompt_has_progress(client: openai.OpenAI) -> None:
    """The server computes 64 tokens in a step."""
    prompt = [7 + (3 * n) % 90 for n in range(200)]
    fields: dict[str, Any] = {"return_progress": True, "cache_salt": "progress"}
    stream = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=3, stream=True, extra_body=fields
    )
    chunks = list(stream)
    progress = [c.model_extra["prompt_progress"] for c in chunks if not c.choices and c.model_extra]
    assert [(p["processed"], p["total"], p["cache"]) for p in progress] == [
        (64, 200, 0),
        (128, 200, 0),
        (192, 200, 0),
    ]
    assert all(p["time_ms"] >= 0 and p["eta_ms"] >= 0 for p in progress)
    # They come before the text, as chunks of the same answer.
    assert [bool(chunk.choices) for chunk in chunks] == [False] * 3 + [True] * (len(chunks) - 3)
    assert len({(chunk.id, chunk.model, chunk.object) for chunk in chunks}) == 1
    short = client.completions.create(
        model="tiny", prompt=prompt[:60], max_tokens=3, stream=True, extra_body=fields
    )
    assert all(chunk.choices for chunk in short)


# --------------------------------------------------------------------------------- real server keys
LIMIT = 6000
SHOWS = ("--enable-tokenizer-info-endpoint", "--admin-key", "root")
KEYS = f"alice[tpm:{LIMIT}+rpm:600]=a,bob[tpm:200]=b"


@pytest.fixture(scope="module")
def keyed(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    checkpoint = checkpoints("llama", dtype="float32")
    with RealServer(checkpoint, tmp_path_factory.mktemp("k"), "--api-key", KEYS, *SHOWS) as up:
        up.until_ready()
        yield up


def _client(server: RealServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def _remaining(answer: Any) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


def test_prompt_and_longest_answer_are_reserved_and_corrected(keyed: RealServer) -> None:
    chat = _client(keyed, "a").chat.completions.with_raw_response
    answer = chat.create(
        model="tiny", messages=HI, max_tokens=100, n=2, stop=["e", "a", " "], seed=1
    )
    usage = answer.parse().usage
    assert usage is not None
    reserved = usage.prompt_tokens + 200
    # 100 come back in a second.
    assert LIMIT - reserved <= _remaining(answer) < LIMIT - reserved + 100
    assert answer.headers["x-ratelimit-limit-requests"] == "600"
    # By now the reservation is what was used; an answer without a bound reserves its prompt alone.
    stream = chat.create(model="tiny", messages=HI, stream=True)
    least = LIMIT - usage.total_tokens - usage.prompt_tokens
    assert least <= _remaining(stream) <= LIMIT - usage.prompt_tokens
    assert list(stream.parse())


def test_a_refused_client_is_served_after_the_time_it_was_given(keyed: RealServer) -> None:
    chat = _client(keyed, "b").chat.completions
    first = chat.create(model="tiny", messages=HI, max_tokens=40, extra_body={"min_tokens": 40})
    assert first.usage is not None
    left = 200 - first.usage.total_tokens
    bound = left - first.usage.prompt_tokens + 20
    with pytest.raises(openai.RateLimitError) as caught:
        chat.create(model="tiny", messages=HI, max_tokens=bound)
    error = caught.value
    assert (error.code, error.type) == ("rate_limit_exceeded", "rate_limit_error")
    wait_s = int(error.response.headers["retry-after-ms"]) / 1000
    # 20 tokens are missing, at 200 a minute.
    assert 0 < wait_s <= 6
    time.sleep(wait_s)
    chat.create(model="tiny", messages=HI, max_tokens=bound, stop=["e", "a", " "])


def test_anthropics_client_gets_its_headers(keyed: RealServer) -> None:
    client = anthropic.Anthropic(base_url=keyed.url, api_key="a", max_retries=0)
    answer = client.messages.with_raw_response.create(model="tiny", messages=HI, max_tokens=5)
    assert answer.headers["anthropic-ratelimit-tokens-limit"] == str(LIMIT)
    assert int(answer.headers["anthropic-ratelimit-tokens-remaining"]) < LIMIT
    limited = anthropic.Anthropic(base_url=keyed.url, api_key="b", max_retries=0)
    with pytest.raises(anthropic.RateLimitError) as caught:
        for _ in range(3):
            limited.messages.create(model="tiny", messages=HI, max_tokens=60)
    assert caught.value.body["error"]["code"] == "rate_limit_exceeded"  # type: ignore[index]
    assert "retry-after" in caught.value.response.headers


def test_the_tokenizer_is_shown_without_paths(keyed: RealServer) -> None:
    assert keyed.client.get("/tokenizer_info").status_code == 401
    info = keyed.client.get("/tokenizer_info", headers={"x-api-key": "a"}).json()
    assert info["tokenizer_class"]
    assert "chat_template" in info
    shown = [value for value in info.values() if isinstance(value, str)]
    assert not any(value.startswith("/") for value in shown)


# ----------------------------------------------------------------------------------- text of images
PICTURE_PART = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/none.png"}}


@pytest.mark.wide
def test_chats_are_answered_and_pictures_refused(tmp_path: Path) -> None:
    checkpoint = make_multimodal_checkpoint("gemma3", tmp_path / "gemma3")
    with RealServer(checkpoint, tmp_path, "--language-model-only") as up:
        up.until_ready()
        for content, status in (
            ("Hello", 200),
            ([{"type": "text", "text": "Hello"}], 200),
            ([{"type": "text", "text": "What is this?"}, PICTURE_PART], 400),
        ):
            message = {"role": "user", "content": content}
            body = {"model": "tiny", "messages": [message], "max_tokens": 4}
            answer = up.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == status, answer.text
        assert "takes text alone" in answer.json()["error"]["message"]
