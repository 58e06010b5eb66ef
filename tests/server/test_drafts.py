"""The real server with speculation: a prediction and a switch that change no answer."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.checkpoints import CheckpointCache
from tests.draft_checkpoints import random_medusa
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}'
WISH: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 40,
    "temperature": 0,
}
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("s")
    llama = checkpoints("llama", dtype="float32")
    with RealServer(llama, folder, "--speculative-config", DRAFTS) as up:
        up.until_ready()
        yield up


@pytest.fixture(scope="module")
def text(client: openai.OpenAI) -> str:
    """The answer without drafts."""
    answer = client.chat.completions.create(**WISH, extra_body={"speculative": False})
    return answer.choices[0].message.content or ""


def test_who_wants_no_drafts_gets_none(server: RealServer, client: openai.OpenAI) -> None:
    before = server.metric(DRAFTED)
    client.chat.completions.create(**WISH, extra_body={"speculative": False})
    wish = {"model": "tiny", "max_tokens": 20, "extra_body": {"speculative": False}}
    client.completions.create(prompt="a b a b a b a b", **wish)
    client.responses.create(
        model="tiny", input="hi", max_output_tokens=20, extra_body={"speculative": False}
    )
    assert server.metric(DRAFTED) == before


def test_a_prediction_changes_no_answer_and_is_counted(
    server: RealServer, client: openai.OpenAI, text: str
) -> None:
    before = server.metric(DRAFTED)
    wish: dict[str, Any] = {**WISH, "prediction": {"type": "content", "content": text}}
    raw = client.chat.completions.with_raw_response.create(**wish)
    assert "x-rbln-ignored-fields" not in raw.headers
    whole = raw.parse()
    assert whole.choices[0].message.content == text
    assert server.metric(DRAFTED) > before
    assert whole.usage is not None
    details = whole.usage.completion_tokens_details
    assert details is not None
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert accepted is not None and rejected is not None and accepted > 0
    counted = server.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    assert accepted + rejected == counted.json()["count"]

    chunks = list(
        client.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens_details == details


def test_a_prediction_of_something_else_is_rejected(client: openai.OpenAI, text: str) -> None:
    wish: dict[str, Any] = {**WISH, "prediction": {"type": "content", "content": "no such words"}}
    whole = client.chat.completions.create(**wish)
    assert whole.choices[0].message.content == text
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.rejected_prediction_tokens


def test_a_prediction_is_of_one_answer(client: openai.OpenAI) -> None:
    wish: dict[str, Any] = {**WISH, "prediction": {"type": "content", "content": "a"}, "n": 2}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**wish)
    assert caught.value.code == "unsupported_field"


def test_requests_cannot_name_their_owner(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**WISH, extra_body={"vllm_xargs": {"speculation": "mine"}})
    assert (caught.value.code, caught.value.param) == ("unsupported_field", "vllm_xargs")


def test_drafts_are_counted_by_bucket(server: RealServer) -> None:
    drafted = server.metric("rbln_draft_tokens_total{")
    assert drafted == server.metric(DRAFTED) > 0
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert server.metric("rbln_draft_accepted_tokens_total{") == accepted


# -------------------------------------------------------------------------- real server draft model
GRAMMAR_WISH: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 40,
}
OFF = {"speculative": False}
WAYS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 7}]


@pytest.fixture(scope="module")
def draft_model_server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("s")
    llama = checkpoints("llama", dtype="float32")
    heads = random_medusa(folder / "heads", llama)
    drafts = f'{{"method": "medusa", "model": "{heads}", "num_speculative_tokens": 3}}'
    with RealServer(llama, folder, "--speculative-config", drafts) as up:
        up.until_ready()
        yield up


@pytest.fixture(scope="module")
def draft_model_client(draft_model_server: RealServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{draft_model_server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_without_drafts(
    draft_model_server: RealServer, draft_model_client: openai.OpenAI, way: dict[str, Any]
) -> None:
    def text(**options: Any) -> str:
        answer = draft_model_client.chat.completions.create(**GRAMMAR_WISH, **way, **options)
        return answer.choices[0].message.content or ""

    def streamed() -> str:
        chunks = draft_model_client.chat.completions.create(**GRAMMAR_WISH, **way, stream=True)
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    plain = text(extra_body=OFF)
    assert plain
    assert text() == streamed() == plain
    # Its drafts come before those of the heads, and all of them are right.
    before = draft_model_server.metric("vllm:spec_decode_num_accepted_tokens_total")
    for _ in range(8):
        assert text(prediction={"type": "content", "content": plain}) == plain
        if draft_model_server.metric("vllm:spec_decode_num_accepted_tokens_total") > before:
            break
        # Noise of a busy machine may have made a check look dear: its budget comes back.
    assert draft_model_server.metric("vllm:spec_decode_num_accepted_tokens_total") > before


def test_metrics_count_the_drafts(
    draft_model_server: RealServer, draft_model_client: openai.OpenAI
) -> None:
    draft_model_client.chat.completions.create(**GRAMMAR_WISH, temperature=0)
    drafts = draft_model_server.metric("vllm:spec_decode_num_draft_tokens_total")
    assert drafts == draft_model_server.metric("rbln_draft_tokens_total{") > 0
    assert drafts >= draft_model_server.metric("vllm:spec_decode_num_drafts_total") > 0
    accepted = draft_model_server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert accepted == draft_model_server.metric("rbln_draft_accepted_tokens_total{")
    places = draft_model_server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total{")
    assert places == accepted
    assert draft_model_server.metric('rbln_graphs{kind="draft"') == 3


def test_the_server_names_its_draft_model(draft_model_server: RealServer) -> None:
    own = draft_model_server.client.get("/v1/server_info").json()["draft_model"]
    assert (own["method"], own["drafts"]) == ("medusa", 3)
    assert own["weight_bytes"] > 0
