"""Large valid bodies from several clients: ``python -m benchmarks.clients.storm_load``.

The first line of standard input is one JSON object, `{"port": …, "model": …, "clients": …,
"budget_seconds": …}`; the end of standard input ends the storm. Standard output is one JSON object,
with how many requests were answered, their bytes, and how many of each status.
"""

from __future__ import annotations

import http.client
import itertools
import json
import sys
import threading
import time
from collections import Counter
from typing import Any

_TURN = {"role": "user", "content": "hello"}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "hello"}] * 4}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "x" * 500,
        "parameters": {
            "type": "object",
            "properties": {f"p{index}": {"type": "string"} for index in range(10)},
        },
    },
}


def bodies(model: str) -> list[tuple[str, bytes]]:
    """Return requests at the default limits of each kind, by path; they cost the engine little."""
    chat = {"model": model, "max_tokens": 1}
    made: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {**chat, "messages": [_TURN] * 2000}),
        ("/v1/chat/completions", {**chat, "messages": [_PARTS] * 2000}),
        ("/v1/chat/completions", {**chat, "messages": [_TURN], "tools": [_TOOL] * 200}),
        ("/v1/responses", {"model": model, "max_output_tokens": 1, "input": [_TURN] * 2000}),
        ("/v1/messages", {**chat, "messages": [_PARTS] * 2000}),
        ("/v1/messages/count_tokens", {"model": model, "messages": [_TURN] * 2000}),
        ("/v1/completions", {**chat, "prompt": [[5] * 900] * 256}),
        ("/tokenize", {"model": model, "prompt": "hello " * 30_000}),
        ("/detokenize", {"model": model, "tokens": [5] * 1000}),
    ]
    return [(path, json.dumps(body).encode()) for path, body in made]


def storm(
    ended: threading.Event, port: int, model: str, clients: int, budget_seconds: float
) -> dict[str, Any]:
    """Send bodies from so many clients until it has ended; each waits for its answers."""
    ends = time.perf_counter() + budget_seconds
    made = bodies(model)
    statuses: Counter[int] = Counter()
    sizes: list[int] = []

    def client(first: int) -> None:
        for path, body in itertools.islice(itertools.cycle(made), first, None):
            if ended.is_set() or time.perf_counter() > ends:
                return
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            connection.close()
            statuses[answer.status] += 1
            sizes.append(len(body))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"requests": len(sizes), "bytes": sum(sizes), "statuses": dict(statuses)}


def main() -> None:
    """Serve the one storm on standard input."""
    request = json.loads(sys.stdin.readline())
    ended = threading.Event()

    def until_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=until_end, daemon=True).start()
    print(json.dumps(storm(ended, **request)))


if __name__ == "__main__":
    main()
