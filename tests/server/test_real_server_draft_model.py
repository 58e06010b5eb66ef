"""The real server with a draft model: the same answers, whole and streamed, and its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.checkpoints import CheckpointCache
from tests.draft_checkpoints import random_medusa
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

WISH: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 40,
}
OFF = {"speculative": False}
WAYS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 7}]


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("s")
    llama = checkpoints("llama", dtype="float32")
    heads = random_medusa(folder / "heads", llama)
    drafts = f'{{"method": "medusa", "model": "{heads}", "num_speculative_tokens": 3}}'
    with RealServer(llama, folder, "--speculative-config", drafts) as up:
        up.until_ready()
        yield up


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_without_drafts(
    server: RealServer, client: openai.OpenAI, way: dict[str, Any]
) -> None:
    def text(**options: Any) -> str:
        answer = client.chat.completions.create(**WISH, **way, **options)
        return answer.choices[0].message.content or ""

    def streamed() -> str:
        chunks = client.chat.completions.create(**WISH, **way, stream=True)
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    plain = text(extra_body=OFF)
    assert plain
    assert text() == streamed() == plain
    # Its drafts come before those of the heads, and all of them are right.
    before = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    for _ in range(8):
        assert text(prediction={"type": "content", "content": plain}) == plain
        if server.metric("vllm:spec_decode_num_accepted_tokens_total") > before:
            break
        # Noise of a busy machine may have made a check look dear: its budget comes back.
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > before


def test_metrics_count_the_drafts(server: RealServer, client: openai.OpenAI) -> None:
    client.chat.completions.create(**WISH, temperature=0)
    drafts = server.metric("vllm:spec_decode_num_draft_tokens_total")
    assert drafts == server.metric("rbln_draft_tokens_total{") > 0
    assert drafts >= server.metric("vllm:spec_decode_num_drafts_total") > 0
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert accepted == server.metric("rbln_draft_accepted_tokens_total{")
    places = server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total{")
    assert places == accepted
    assert server.metric('rbln_graphs{kind="draft"') == 3


def test_the_server_names_its_draft_model(server: RealServer) -> None:
    own = server.client.get("/v1/server_info").json()["draft_model"]
    assert (own["method"], own["drafts"]) == ("medusa", 3)
    assert own["weight_bytes"] > 0
