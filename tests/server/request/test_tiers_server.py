"""Tiers of a real engine by the official clients: who waits, and what answers say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    with RealServer(checkpoints("llama"), tmp_path_factory.mktemp("s")) as up:
        up.until_ready()
        yield up


@pytest.mark.parametrize(
    ("requested", "used"),
    [("auto", "default"), ("default", "default"), ("flex", "flex"), ("priority", "priority")],
)
def test_answers_say_which_tier_it_was(client: openai.OpenAI, requested: Any, used: str) -> None:
    chat = client.chat.completions.create(**CHAT, max_tokens=3, service_tier=requested)
    assert chat.service_tier == used
    chunks = list(
        client.chat.completions.create(**CHAT, max_tokens=3, service_tier=requested, stream=True)
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
    chunks = list(client.chat.completions.create(**CHAT, max_tokens=3, stream=True))
    assert {chunk.service_tier for chunk in chunks} == {None}


def test_anthropics_tiers(server: RealServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    for requested in ("auto", "standard_only"):
        message = client.messages.create(**CHAT, max_tokens=3, service_tier=requested)  # type: ignore[call-overload]
        assert message.usage.service_tier == "standard"
    with client.messages.stream(**CHAT, max_tokens=3) as stream:
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
    front = [threading.Thread(target=ask, args=(4 + n, "default", 40)) for n in range(4)]
    for thread in front:
        thread.start()
    for thread in front + behind:
        thread.join()
    assert ended[:4] == ["default"] * 4, "they came later, and no row of theirs was taken"
    assert [texts[number] for number in range(4)] == alone
    assert server.metric("rbln_recompiles_after_warmup_total") == 0
