"""Mixed load on a real server: free, streamed, tiered, structured, adapted, faulty, abandoned.

Each kind leaves its trace in metrics, so that no panel that should show something stays empty.
"""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import httpx

from tests.server.real_server import RealServer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
_PREFIX = list(range(30, 94))


class MixedLoad:
    """Clients in threads; a context manager that ends them. `statuses` counts the answers."""

    def __init__(self, server: RealServer, *, clients: int = 3, pause_s: float = 0.02) -> None:
        self._url, self._pause_s = server.url, pause_s
        self._enough = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(clients)]
        self._kinds: tuple[Callable[[httpx.Client, random.Random], None], ...] = (
            self._free,
            self._streamed,
            self._same_prefix,
            self._faulty,
            self._flexible,
            self._structured,
            self._adapted,
            self._abandoned,
            self._large,
        )
        self.statuses: list[int] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(60)

    def burst(self, requests: int) -> None:
        """Send more requests at once than are admitted; returns when all were answered."""
        body = {"model": "tiny", "prompt": _PREFIX, "max_tokens": 48, "ignore_eos": True}
        client = httpx.Client(base_url=self._url, timeout=60, limits=httpx.Limits())
        with client, ThreadPoolExecutor(requests) as pool:
            answers = pool.map(lambda _: client.post(COMPLETIONS, json=body), range(requests))
            self.statuses += [answer.status_code for answer in answers]

    def _run(self, number: int) -> None:
        choice = random.Random(number)
        with httpx.Client(base_url=self._url, timeout=60) as client:
            turn = number
            while not self._enough.is_set():
                self._kinds[turn % len(self._kinds)](client, choice)
                turn += 1
                time.sleep(self._pause_s)

    def _post(self, client: httpx.Client, path: str, **body: object) -> None:
        answer = client.post(path, json={"model": "tiny", "max_tokens": 12, **body})
        self.statuses.append(answer.status_code)

    def _free(self, client: httpx.Client, choice: random.Random) -> None:
        prompt = [choice.randrange(20, 400) for _ in range(choice.randrange(1, 100))]
        self._post(client, COMPLETIONS, prompt=prompt, max_tokens=choice.randrange(4, 40))
        self._post(client, COMPLETIONS, prompt=[prompt, prompt[:20], prompt[:9]], n=1)

    def _streamed(self, client: httpx.Client, choice: random.Random) -> None:
        messages = [{"role": "user", "content": f"Count to {choice.randrange(100)}."}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 24, "stream": True}
        with client.stream("POST", CHAT, json=body) as answer:
            self.statuses.append(answer.status_code)
            for _ in answer.iter_lines():
                pass

    def _same_prefix(self, client: httpx.Client, choice: random.Random) -> None:
        for length in (40, 52, 64):
            tail = [choice.randrange(20, 400)]
            self._post(client, COMPLETIONS, prompt=_PREFIX[:length] + tail)

    def _faulty(self, client: httpx.Client, choice: random.Random) -> None:
        self._post(client, COMPLETIONS, prompt=_PREFIX, temperature=-1)
        self._post(client, COMPLETIONS, prompt=_PREFIX, model="nobody")

    def _flexible(self, client: httpx.Client, _: random.Random) -> None:
        self._post(client, COMPLETIONS, prompt=_PREFIX, service_tier="flex")

    def _large(self, client: httpx.Client, _: random.Random) -> None:
        body = {"model": "tiny", "prompt": "large " * 8000}
        self.statuses.append(client.post("/tokenize", json=body).status_code)

    def _structured(self, client: httpx.Client, choice: random.Random) -> None:
        name = f"n{choice.randrange(1000)}"
        schema = {**_SCHEMA, "properties": {name: {"type": "boolean"}}, "required": [name]}
        shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        messages = [{"role": "user", "content": "Say yes."}]
        self._post(client, CHAT, messages=messages, response_format=shape)

    def _adapted(self, client: httpx.Client, choice: random.Random) -> None:
        self._post(client, COMPLETIONS, prompt=_PREFIX, model="fixed", max_tokens=40)

    def _abandoned(self, client: httpx.Client, choice: random.Random) -> None:
        body = {"model": "tiny", "prompt": _PREFIX, "max_tokens": 120, "stream": True}
        with client.stream("POST", COMPLETIONS, json={**body, "ignore_eos": True}) as answer:
            next(answer.iter_lines(), None)
