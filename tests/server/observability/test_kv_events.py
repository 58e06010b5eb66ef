"""KV events as a prefix-aware router hears them: over ZMQ, from a real server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

BLOCK, BLOCKS = 16, 17  # room for one request of 256 tokens, and the block that stands for none


class Subscriber:
    """Router that subscribes to a topic and keeps the batches in their order."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "kv")
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.numbers: list[int] = []

    def events(self, *, first_wait_ms: int = 20_000) -> list[BlockStored | BlockRemoved]:
        """Return the received batches: at least one, and those that follow it within a moment."""
        found: list[Any] = []
        wait = first_wait_ms
        while self._socket.poll(wait):
            _, number, payload = self._socket.recv_multipart()
            self.numbers.append(int.from_bytes(number, "big"))
            found += self._decoder.decode(payload).events
            wait = 1000
        return found

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture(scope="module")
def heard(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RealServer, Subscriber]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}
    # vLLM binds where the host is a star, and connects to a name.
    flags = ("--kv-events-config", json.dumps({**events, "endpoint": f"tcp://*:{port}"}))
    few = ("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "1")
    model, folder = checkpoints("llama", dtype="float32"), Path(tmp_path_factory.mktemp("s"))
    with RealServer(model, folder, *flags, *few) as server:
        server.until_ready()
        subscriber = Subscriber(f"tcp://127.0.0.1:{port}")
        # A subscription takes a moment to arrive; earlier events are lost.
        for number in range(40, 60):
            complete(server, [number] * BLOCK * 2)
            if subscriber.events(first_wait_ms=500):
                break
        yield server, subscriber
        subscriber.close()


def complete(server: RealServer, prompt: list[int]) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def test_full_blocks_are_stored_in_a_chain_and_removed_when_others_need_room(
    heard: tuple[RealServer, Subscriber],
) -> None:
    server, subscriber = heard
    prompt = [20 + i for i in range(3 * BLOCK + 5)]
    complete(server, prompt)
    stored = [event for event in subscriber.events() if isinstance(event, BlockStored)]
    assert [token for event in stored for token in event.token_ids] == prompt[: 3 * BLOCK]
    assert {event.block_size for event in stored} == {BLOCK}
    hashes = [name for event in stored for name in event.block_hashes]
    assert len(set(hashes)) == 3
    assert stored[0].parent_block_hash is None

    longer = prompt[: 3 * BLOCK] + [90] * BLOCK + [91]
    used = complete(server, longer)
    assert used["prompt_tokens_details"]["cached_tokens"] == 3 * BLOCK
    [more] = [event for event in subscriber.events() if isinstance(event, BlockStored)]
    # A block that a prefix hit found is not stored again: the next one hangs on it.
    assert (more.parent_block_hash, more.token_ids) == (hashes[-1], [90] * BLOCK)

    complete(server, [150] * (15 * BLOCK + 1))
    gone = [event for event in subscriber.events() if isinstance(event, BlockRemoved)]
    assert set(hashes) <= {name for event in gone for name in event.block_hashes}


def test_batches_are_numbered_without_a_gap(heard: tuple[RealServer, Subscriber]) -> None:
    server, subscriber = heard
    complete(server, [33] * BLOCK * 2)
    subscriber.events()
    assert len(subscriber.numbers) > 1
    first = subscriber.numbers[0]
    assert subscriber.numbers == list(range(first, first + len(subscriber.numbers)))
