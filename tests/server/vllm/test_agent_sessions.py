"""Sessions of coding agents over both APIs: a turn reads the last one's prompt from the cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer
from tests.server.vllm.agent_sessions import Head, Session, billing

pytestmark = pytest.mark.engine

TURNS = 5
UNIT = 16
"""Tokens by which prefixes are reused: the block size of the test's server."""
GENERATION_PROMPT = 8
"""At least as many tokens as the template adds for the answer to come."""

Ask = Callable[[RealServer, Session], tuple[int, int]]


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    checkpoint = checkpoints("llama", dtype="float32", max_position_embeddings=16384)
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
    """Return how many tokens a turn's prompt has, and how many of them were cached."""
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
    server: RealServer, seed: int, ask: Ask, head: Head | None
) -> None:
    turns = replayed(server, ask, seed, head)
    for (before, _), (length, cached) in pairwise(turns):
        assert cached >= before - GENERATION_PROMPT - UNIT
        assert cached / length > 0.85


@pytest.mark.parametrize(("seed", "ask"), [(6, by_messages), (7, by_responses)])
def test_a_changing_line_at_the_head_costs_all_hits(
    server: RealServer, seed: int, ask: Ask
) -> None:
    def nonce(turn: int) -> str:
        return f"{turn} of many"

    # What lies before it is the template's.
    assert all(cached <= 2 * UNIT for _, cached in replayed(server, ask, seed, nonce))
