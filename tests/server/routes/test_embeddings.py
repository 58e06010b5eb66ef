"""The real server over models that pool: embeddings with the official client, scores, classes."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from tests.adapters import make_adapter, merge
from tests.checkpoints import CheckpointCache
from tests.pooling_checkpoints import (
    class_logits,
    classifier,
    encoder,
    hidden_states,
    pooled,
    sentence_transformer,
)
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

EMBEDDINGS = "/v1/embeddings"
# Three and a half chunks of 64.
LONG = "a b c d " * 55


@pytest.fixture(scope="module")
def checkpoint(checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = checkpoints("qwen3"), tmp_path_factory.mktemp("st") / "checkpoint"
    return sentence_transformer(source, target, matryoshka_dimensions=[32, 64])


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(checkpoint, tmp_path_factory.mktemp("adapter"), rank=8)


@pytest.fixture(scope="module")
def server(
    checkpoint: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    # Nothing says that the model pools but its own files.
    lora = ("--enable-lora", "--lora-modules", f"adapted={adapter}")
    flags = ("--max-queue-s", "3", *lora)
    with RealServer(checkpoint, tmp_path_factory.mktemp("s"), *flags) as up:
        up.until_ready()
        yield up


def token_ids(server: RealServer, text: str) -> list[int]:
    ids: list[int] = server.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


def difference(actual: list[float], expected: torch.Tensor) -> float:
    return float((torch.tensor(actual) - expected).abs().max())


def test_it_says_what_it_is(server: RealServer, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "adapted"]
    graphs = server.client.get("/readyz").json()["graphs"]
    assert graphs["done"] == graphs["total"] == server.metric('rbln_graphs{kind="pooling"') > 0
    assert server.metric("rbln_graphs{") == graphs["total"]


def test_invocations_embed(server: RealServer) -> None:
    header = {"x-amzn-sagemaker-adapter-identifier": "adapted"}
    answer = server.client.post("/invocations", json={"input": "hello"}, headers=header).json()
    assert answer["model"] == "adapted"
    body = {"input": "hello", "model": "adapted"}
    assert answer["data"] == server.client.post("/v1/embeddings", json=body).json()["data"]


def test_texts_in_both_encodings(
    server: RealServer, client: openai.OpenAI, checkpoint: Path
) -> None:
    texts = ["hello", LONG, "a b c"]
    ids = [token_ids(server, text) for text in texts]
    assert len(ids[1]) > 128, "several chunks"
    # The client requests base64 by default.
    packed = client.embeddings.create(model="tiny", input=texts)
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert [item.index for item in packed.data] == [0, 1, 2]
    for prompt, item, again in zip(ids, packed.data, plain.data, strict=True):
        assert difference(item.embedding, pooled(checkpoint, prompt, "LAST")) < 1e-4
        assert again.embedding == item.embedding
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == sum(map(len, ids))
    single = client.embeddings.create(model="tiny", input=LONG)
    assert single.data[0].embedding == packed.data[1].embedding, "company changes no bit"


def test_an_adapter_embeds_by_its_name(
    client: openai.OpenAI, checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    prompt = list(range(5, 80))
    answer = client.embeddings.create(model="adapted", input=prompt)
    expected = pooled(merge(checkpoint, adapter, tmp_path / "merged"), prompt, "LAST")
    assert difference(answer.data[0].embedding, expected) < 1e-4
    plain = client.embeddings.create(model="tiny", input=prompt)
    assert difference(plain.data[0].embedding, expected) > 1e-2


def test_token_ids_and_dimensions(client: openai.OpenAI, checkpoint: Path) -> None:
    prompts = [[5, 6, 7], [8]]
    answer = client.embeddings.create(model="tiny", input=prompts, dimensions=32)
    for prompt, item in zip(prompts, answer.data, strict=True):
        expected = normalize(hidden_states(checkpoint, prompt)[-1][:32], dim=-1)
        assert difference(item.embedding, expected) < 1e-4
    assert answer.usage.prompt_tokens == 4
    one = client.embeddings.create(model="tiny", input=prompts[0], dimensions=32)
    assert one.data[0].embedding == answer.data[0].embedding


def test_a_prompt_of_the_whole_context(client: openai.OpenAI, checkpoint: Path) -> None:
    prompt = [7 + index % 90 for index in range(256)]
    (item,) = client.embeddings.create(model="tiny", input=prompt).data
    assert difference(item.embedding, pooled(checkpoint, prompt, "LAST")) < 1e-4


@pytest.mark.parametrize("kept", [10, -1])
def test_long_texts_are_cut_on_demand(
    server: RealServer, client: openai.OpenAI, checkpoint: Path, kept: int
) -> None:
    text = "a b c d " * 200
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input=text)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "input"
    assert "256" in caught.value.message
    wish: dict[str, Any] = {"truncate_prompt_tokens": kept}
    answer = client.embeddings.create(model="tiny", input=text, extra_body=wish)
    used = token_ids(server, LONG * 2)[: kept if kept > 0 else 256]
    assert answer.usage.prompt_tokens == len(used)
    assert difference(answer.data[0].embedding, pooled(checkpoint, used, "LAST")) < 1e-4


def test_conversations_take_the_chat_template(server: RealServer, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = server.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    # Tokenised as for an answer, embedded as it stands.
    wish: dict[str, Any] = {"add_generation_prompt": True}
    expected = client.embeddings.create(model="tiny", input=ids).data[0].embedding
    for body in ({"messages": messages}, {"messages": [messages]}, {"input": messages}):
        answer = server.client.post(EMBEDDINGS, json={**body, **wish})
        assert answer.json()["data"][0]["embedding"] == pytest.approx(expected, abs=1e-6)


def test_scores_are_cosines(server: RealServer, client: openai.OpenAI) -> None:
    texts = ["hello", "good bye", "hello there"]
    made = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    query, *documents = (torch.tensor(item.embedding) for item in made.data)
    cosines = [float(query @ document) for document in documents]
    body: dict[str, Any] = {"queries": texts[0], "documents": texts[1:]}
    for path in ("/score", "/v1/score"):
        scored = server.client.post(path, json=body).json()
        assert [item["score"] for item in scored["data"]] == pytest.approx(cosines, abs=1e-5)
    wish = {"query": texts[0], "documents": texts[1:], "top_n": 1}
    best = max(range(2), key=lambda index: cosines[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        (result,) = server.client.post(path, json=wish).json()["results"]
        assert result["index"] == best
        assert result["relevance_score"] == pytest.approx(cosines[best], abs=1e-5)


def test_pooling_and_cohere_give_the_same_vector(server: RealServer, client: openai.OpenAI) -> None:
    expected = client.embeddings.create(model="tiny", input="hello").data[0].embedding
    pool = server.client.post("/pooling", json={"input": "hello"}).json()
    assert pool["data"][0]["data"] == pytest.approx(expected, abs=1e-6)
    cohere = server.client.post("/v2/embed", json={"texts": ["hello"]}).json()
    assert cohere["embeddings"]["float"][0] == pytest.approx(expected, abs=1e-6)


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
ERRORS: list[tuple[str, dict[str, Any], int, str, str | None]] = [
    (EMBEDDINGS, {}, 400, "missing_field", "input"),
    (EMBEDDINGS, {"input": ""}, 400, "invalid_value", "input"),
    (EMBEDDINGS, {"input": 5}, 400, "invalid_type", "input"),
    (EMBEDDINGS, {"input": [1.5]}, 400, "invalid_type", "input[0]"),
    (EMBEDDINGS, {"input": ["a"] * 257}, 400, "invalid_value", "input"),
    (EMBEDDINGS, {"input": [5, 10**6]}, 400, "invalid_value", "input[1]"),
    (EMBEDDINGS, {"input": [5] * 257}, 400, "context_length_exceeded", "input"),
    (EMBEDDINGS, {"input": "a", "model": "other"}, 404, "model_not_found", "model"),
    (EMBEDDINGS, {"input": "a", "dimensions": 33}, 400, "invalid_value", "dimensions"),
    (EMBEDDINGS, {"input": "a", "encoding_format": "bytes"}, 400, "invalid_value", None),
    (EMBEDDINGS, {"input": "a", "xyz": 1}, 400, "unknown_field", "xyz"),
    (EMBEDDINGS, {"input": "a", "normalize": True}, 400, "unknown_field", "normalize"),
    (EMBEDDINGS, {"input": "a", "priority": 1}, 400, "unsupported_field", "priority"),
    (
        EMBEDDINGS,
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        400,
        "unsupported_field",
        None,
    ),
    ("/v2/embed", {"images": [IMAGE["image_url"]]}, 400, "unsupported_field", "images"),
    ("/v2/embed", {}, 400, "invalid_value", None),
    ("/pooling", {"input": "a", "task": "token_embed"}, 400, "invalid_value", "task"),
    ("/score", {"queries": "a"}, 400, "missing_field", "documents"),
    ("/score", {"queries": "a", "documents": LONG * 2}, 400, "context_length_exceeded", None),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, 400, "invalid_value", "top_n"),
    ("/classify", {"input": "a"}, 400, "unsupported_operation", None),
    ("/v1/chat/completions", {"messages": []}, 400, "unsupported_operation", None),
    ("/v1/completions", {"prompt": "a"}, 400, "unsupported_operation", None),
    ("/v1/responses", {"input": "a"}, 400, "unsupported_operation", None),
    ("/v1/messages", {"messages": []}, 400, "unsupported_operation", None),
]


@pytest.mark.parametrize(("path", "body", "status", "code", "param"), ERRORS)
def test_bad_requests_are_refused_by_name(
    server: RealServer, path: str, body: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    answer = server.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code, error
    assert param is None or error["param"] == param
    assert error["message"]


def test_a_client_that_goes_away_aborts_in_the_engine(server: RealServer) -> None:
    body = {"input": [[7 + (index + row) % 90 for index in range(256)] for row in range(40)]}
    content = json.dumps(body).encode()
    before = server.metric("vllm:prompt_tokens_total")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(content), content)
        )
        while server.metric("vllm:num_requests_waiting") < 1:
            time.sleep(0.001)
    deadline = time.monotonic() + 5
    while server.metric("rbln_serve_in_flight_requests"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.client.post(EMBEDDINGS, json={"input": "a"}).status_code == 200
    assert server.metric("vllm:prompt_tokens_total") - before < 40 * 256
    assert server.metric("vllm:num_requests_running") == 0


def test_late_interaction_compares_every_token(checkpoint: Path, tmp_path: Path) -> None:
    pooler = '{"task": "token_embed"}'
    with RealServer(checkpoint, tmp_path, "--pooler-config", pooler) as server:
        server.until_ready()
        texts = ["hello", "good bye", "hello there"]
        query, *documents = (
            normalize(hidden_states(checkpoint, token_ids(server, text)), dim=-1) for text in texts
        )
        best = [float((query @ document.T).amax(1).sum()) for document in documents]
        body: dict[str, Any] = {"queries": texts[0], "documents": texts[1:]}
        # Twice: a query's vectors wait in the worker for its documents, and no longer.
        for _ in range(2):
            scored = server.client.post("/score", json=body).json()["data"]
            assert [item["score"] for item in scored] == pytest.approx(best, abs=1e-4)


def test_a_result_that_is_not_finite_is_an_error_of_the_server(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    checkpoint = encoder("Bert", checkpoints("llama"), tmp_path / "bert", num_labels=1)
    weights = load_file(checkpoint / "model.safetensors")
    weights["classifier.bias"].fill_(torch.nan)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    texts = ["a river", "a mountain"]
    with RealServer(checkpoint, tmp_path) as server:
        server.until_ready()
        for path, fields in (
            ("/rerank", {"query": "a", "documents": texts}),
            ("/v2/rerank", {"query": "a", "documents": [{"text": one} for one in texts]}),
            ("/score", {"text_1": "a", "text_2": texts}),
            ("/classify", {"input": texts}),
            ("/pooling", {"input": texts}),
            ("/pooling", {"input": texts, "encoding_format": "base64"}),
        ):
            answer = server.client.post(path, json={"model": "tiny", **fields})
            assert answer.status_code == 500, answer.text
            assert answer.json()["error"]["code"] == "internal_error"
            assert "not finite" in answer.json()["error"]["message"]


@pytest.mark.wide
def test_an_encoder_embeds(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    checkpoint = encoder("Bert", checkpoints("llama"), tmp_path / "bert")
    with RealServer(checkpoint, tmp_path) as server:
        server.until_ready()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answer = client.embeddings.create(model="tiny", input=["hello", LONG])
        for text, item in zip(["hello", LONG], answer.data, strict=True):
            expected = pooled(checkpoint, token_ids(server, text), "CLS")
            assert difference(item.embedding, expected) < 1e-4
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="tiny", input=[5] * 257)
        assert caught.value.code == "context_length_exceeded"


def test_a_reranker_classifies_and_scores(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    checkpoint = classifier(checkpoints("qwen3"), tmp_path / "classifier", num_labels=1)
    with RealServer(checkpoint, tmp_path) as server:
        server.until_ready()
        answer = server.client.post("/classify", json={"input": ["hello", LONG]}).json()
        for text, item in zip(["hello", LONG], answer["data"], strict=True):
            expected = class_logits(checkpoint, token_ids(server, text)).sigmoid()
            assert item["num_classes"] == 1
            assert difference(item["probs"], expected) < 1e-4
        # A query and a document of a cross-encoder are one prompt.
        ids = token_ids(server, "hello") + token_ids(server, "bye")
        body: dict[str, Any] = {"queries": "hello", "documents": "bye"}
        scored = server.client.post("/score", json=body).json()
        assert scored["usage"]["prompt_tokens"] in (len(ids), len(ids) - 1)
        refused = server.client.post(EMBEDDINGS, json={"input": "a"})
        assert refused.status_code == 400
        assert "classify" in refused.json()["error"]["message"]


def test_only_the_prompt_that_waits_too_long_times_out(server: RealServer) -> None:
    body = {"model": "tiny", "input": ["a b", "c d"]}
    with ThreadPoolExecutor(1) as pool:
        os.kill(server.engine_pid(), signal.SIGSTOP)
        try:
            late = pool.submit(server.client.post, EMBEDDINGS, json=body)
            time.sleep(4)
        finally:
            os.kill(server.engine_pid(), signal.SIGCONT)
        assert late.result().status_code == 503
    assert late.result().json()["error"]["code"] == "queue_timeout"
    assert server.client.post(EMBEDDINGS, json=body).status_code == 200
