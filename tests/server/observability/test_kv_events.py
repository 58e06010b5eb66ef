"""KV events as a prefix-aware router receives them: over ZMQ, from real servers."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from benchmarks.engines.server_process import free_port
from tests.checkpoints import CheckpointCache
from tests.server.observability.kv_subscriber import KvSubscriber
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

TOPIC = "kv@10.0.0.7:8000@tiny"
BLOCK, UNIT, BLOCKS = 64, 16, 5  # room for one request of 256 tokens, and the null block
FEW = ("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "1")


class Followed:
    """Server that publishes KV events, and a router that follows it from its start on."""

    def __init__(self, checkpoint: Path, folder: Path, *flags: str) -> None:
        ports = free_port(), free_port()
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "topic": TOPIC,
            # vLLM binds where the host is a star, and connects to a name.
            "endpoint": f"tcp://*:{ports[0]}",
            "replay_endpoint": f"tcp://*:{ports[1]}",
        }
        self.addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        self.server = RealServer(
            checkpoint, folder, "--block-size", str(BLOCK), *flags,
            *("--kv-events-config", json.dumps(events)),
        )  # fmt: skip
        self.router = KvSubscriber(*self.addresses)

    def __enter__(self) -> Followed:
        self.server.until_ready()
        # A subscription takes a moment to arrive; the replay port has what was missed.
        self.complete([7] * UNIT * 2)
        self.router.catch_up()
        return self

    def __exit__(self, *_: object) -> None:
        self.router.close()
        self.server.__exit__(None, None, None)

    def complete(self, prompt: list[int], **fields: Any) -> int:
        """Return the tokens that the answer says were cached."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        answer = self.server.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached


@pytest.fixture(scope="module")
def followed(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Followed]:
    model = checkpoints("llama", dtype="float32")
    with Followed(model, Path(tmp_path_factory.mktemp("s")), *FEW) as one:
        yield one


def test_units_are_stored_in_a_chain_and_removed_when_others_need_room(followed: Followed) -> None:
    prompt = [20 + i for i in range(3 * UNIT + 5)]
    followed.complete(prompt)
    [stored] = followed.router.read()
    assert isinstance(stored, BlockStored)
    assert (stored.token_ids, stored.block_size) == (prompt[: 3 * UNIT], UNIT)
    assert (stored.parent_block_hash, len(set(stored.block_hashes))) == (None, 3)
    assert (stored.kv_cache_spec_kind, stored.group_idx) == ("full_attention", 0)

    assert followed.complete(prompt[: 3 * UNIT] + [90] * (UNIT + 1)) == 3 * UNIT
    more = [event for event in followed.router.read() if isinstance(event, BlockStored)]
    # The block fills up. Its first three units are not stored again: the fourth follows them.
    assert [(e.parent_block_hash, e.token_ids) for e in more] == [
        (stored.block_hashes[-1], [90] * UNIT)
    ]

    followed.complete([150] * (4 * BLOCK - 2))
    gone = [event for event in followed.router.read() if isinstance(event, BlockRemoved)]
    assert {*stored.block_hashes} <= {name for event in gone for name in event.block_hashes}
    assert followed.router.index.hit(prompt) == 0 == followed.complete(prompt)


def test_a_router_predicts_every_hit(followed: Followed) -> None:
    rng = random.Random(0)
    assert _predict(followed, rng) > 10
    assert followed.router.topics == {TOPIC}
    assert followed.router.ranks == {0}


def _predict(followed: Followed, rng: random.Random) -> int:
    """Send prompts with common prefixes; return how many hits there were."""
    stems = [[rng.randrange(5, 200) for _ in range(200)] for _ in range(3)]
    hits = 0
    for _ in range(30):
        prompt = rng.choice(stems)[: rng.randrange(1, 201)] + [rng.randrange(5, 200)] * 3
        followed.router.read(wait_ms=50)
        predicted = followed.router.index.hit(prompt)
        hits += predicted > 0
        assert followed.complete(prompt) == predicted
    return hits


def test_a_cleared_cache_is_reported_at_once(followed: Followed) -> None:
    prompt = [30] * (2 * UNIT + 1)
    followed.complete(prompt)
    followed.router.read()
    assert followed.router.index.hit(prompt) == 2 * UNIT
    assert followed.server.client.post("/reset_prefix_cache").json() == {"success": True}
    assert followed.router.read() == [AllBlocksCleared()]
    assert followed.router.index.hit(prompt) == 0 == followed.complete(prompt)


def test_a_gap_is_filled_from_the_replay_port(followed: Followed) -> None:
    followed.router.read()
    late = KvSubscriber(*followed.addresses)
    prompt = [41] * (2 * UNIT + 1)
    followed.complete(prompt)
    # This one may or may not have received the batch; both know all that came before.
    late.read()
    late.catch_up()
    followed.router.read()
    assert late.replayed > 0
    assert late.index.held == followed.router.index.held
    # After a lost batch, the next one makes the subscriber ask for it.
    late._events.unsubscribe("kv@")
    time.sleep(0.2)
    followed.complete([42] * (UNIT + 1))
    late._events.subscribe("kv@")
    time.sleep(0.2)
    followed.complete([43] * (UNIT + 1))
    late.read()
    followed.router.read()
    assert late.index.hit([42] * (UNIT + 1)) == UNIT
    assert late.index.held == followed.router.index.held
    late.close()


def test_windows_have_events_of_their_own(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    model = checkpoints("gemma3_text", dtype="float32")
    with ExitStack() as stack:
        followed = stack.enter_context(Followed(model, tmp_path))
        assert _predict(followed, random.Random(1)) > 10
        events = followed.router.index.windows
        assert sorted(map(bool, events.values())) == [False, True]
