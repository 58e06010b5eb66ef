"""Router's view of one server's prefix cache, from its KV events over ZMQ."""

from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
    ZmqEventPublisher,
)

_Hash = bytes | int


class PrefixIndex:
    """Units that a server can reuse, found by their tokens.

    The server's hashes are opaque: a unit is found by the hash of its parent and its tokens.
    """

    def __init__(self) -> None:
        self.unit = 0
        """Tokens of a unit; 0 until the first event."""
        self.held: set[tuple[int | None, _Hash]] = set()
        self._children: dict[tuple[_Hash | None, tuple[int, ...]], _Hash] = {}
        self.windows: dict[int | None, int | None] = {}
        """Tokens of each group's window, None with full attention."""

    def apply(self, event: KVCacheEvent) -> None:
        """Apply an event; raises ``KeyError`` for the removal of a unit that is not held."""
        if isinstance(event, AllBlocksCleared):
            self.held.clear()
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                self.held.remove((event.group_idx, name))
        elif isinstance(event, BlockStored):
            self.unit, parent = event.block_size, event.parent_block_hash
            self.windows[event.group_idx] = event.kv_cache_spec_sliding_window
            for number, name in enumerate(event.block_hashes):
                tokens = event.token_ids[number * self.unit : (number + 1) * self.unit]
                self._children[parent, tuple(tokens)] = name
                self.held.add((event.group_idx, name))
                parent = name

    def hit(self, tokens: Sequence[int]) -> int:
        """Return the tokens of a prompt that the server will reuse; it computes the last one."""
        names = self._names(tokens[:-1])
        for end in range(len(names), 0, -1):
            if all(
                (group, name) in self.held
                for group, window in self.windows.items()
                for name in names[self._first(end, window) : end]
            ):
                return end * self.unit
        return 0

    def _first(self, end: int, window: int | None) -> int:
        """Return the first unit that a group needs to resume at the unit ``end``."""
        return max(0, end * self.unit - window) // self.unit if window else 0

    def _names(self, tokens: Sequence[int]) -> list[_Hash]:
        """Return the hashes of the longest known prefix, held or not."""
        names: list[_Hash] = []
        parent: _Hash | None = None
        for end in range(self.unit, len(tokens) + 1, self.unit or 1):
            name = self._children.get((parent, tuple(tokens[end - self.unit : end])))
            if name is None:
                break
            names.append(name)
            parent = name
        return names


class KvSubscriber:
    """Follows the events of one server, and fills gaps from its replay port."""

    def __init__(self, endpoint: str, replay: str, topic: str = "kv@") -> None:
        """Subscribe to ``endpoint``, both addresses as ``tcp://HOST:PORT``, ``topic`` a prefix."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._events: zmq.Socket[bytes] = context.socket(zmq.SUB)
        self._events.connect(endpoint)
        self._events.setsockopt_string(zmq.SUBSCRIBE, topic)
        # A replay is one request with many answers, which a REQ socket would refuse to read.
        self._replay: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._replay.connect(replay)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._next = 0
        self.replayed = 0
        """Batches that came from the replay port."""
        self.topics: set[str] = set()
        self.ranks: set[int | None] = set()
        self.index = PrefixIndex()

    def read(self, wait_ms: int = 1000) -> list[Any]:
        """Apply what arrives until ``wait_ms`` pass without a batch; return the events."""
        found: list[Any] = []
        while self._events.poll(wait_ms):
            topic, number, payload = self._events.recv_multipart()
            self.topics.add(topic.decode())
            found += self._take(int.from_bytes(number, "big"), payload)
        return found

    def catch_up(self, wait_ms: int = 5000) -> list[Any]:
        """Apply the batches from the next expected one on, from the replay port.

        Raises ``TimeoutError`` when no answer comes within ``wait_ms``.
        """
        found: list[Any] = []
        self._replay.send_multipart((b"", self._next.to_bytes(8, "big")))
        while self._replay.poll(wait_ms):
            _, _, number, payload = self._replay.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return found
            self.replayed += 1
            found += self._apply(int.from_bytes(number, "big"), payload)
        raise TimeoutError(f"no replay within {wait_ms} ms")

    def close(self) -> None:
        self._events.close(linger=0)
        self._replay.close(linger=0)

    def _take(self, number: int, payload: bytes) -> list[Any]:
        """Apply a published batch after those that were missed; skip it if it was replayed."""
        missed = self.catch_up() if number > self._next else []
        return missed + self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> list[Any]:
        if number < self._next:
            return []
        self._next = number + 1
        batch = self._decoder.decode(payload)
        self.ranks.add(batch.data_parallel_rank)
        for event in batch.events:
            self.index.apply(event)
        return list(batch.events)
