"""Clients that keep asking, some for streams, and remember every answer that was not whole."""

import asyncio
import json
import threading
from typing import Self

import httpx


class SteadyLoad:
    """`clients` in a thread of their own, every other one streaming; a context manager."""

    def __init__(self, url: str, model: str, clients: int, max_tokens: int) -> None:
        self._url, self._clients = url, clients
        self._body = {"model": model, "prompt": "a b c", "max_tokens": max_tokens}
        self._body |= {"ignore_eos": True, "temperature": 0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.whole = {"streams": 0, "answers": 0}
        self.lost: list[str] = []
        self.texts: set[str] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=self._clients)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._clients):
                group.create_task(self._ask_on(client, streaming=number % 2 == 0))

    async def _ask_on(self, client: httpx.AsyncClient, *, streaming: bool) -> None:
        while not self._stop.is_set():
            try:
                problem = await (self._stream(client) if streaming else self._answer(client))
            except httpx.HTTPError as error:
                problem = repr(error)
            if problem is None:
                self.whole["streams" if streaming else "answers"] += 1
            else:
                self.lost.append(problem)

    async def _answer(self, client: httpx.AsyncClient) -> str | None:
        answer = await client.post("/v1/completions", json=self._body)
        if answer.status_code != 200:
            return f"{answer.status_code}: {answer.text[:200]}"
        body = answer.json()
        self.texts.add(body["choices"][0]["text"])
        whole = body["usage"]["completion_tokens"] == self._body["max_tokens"]
        return None if whole else f"cut off: {answer.text[-200:]}"

    async def _stream(self, client: httpx.AsyncClient) -> str | None:
        body = {**self._body, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code}: {(await answer.aread())[:200]!r}"
            lines = [x[6:] async for x in answer.aiter_lines() if x.startswith("data: ")]
        if not lines or lines[-1] != "[DONE]":
            return f"no [DONE] after {len(lines)} events"
        events = [json.loads(line) for line in lines[:-1]]
        self.texts.add("".join(c["text"] for event in events for c in event.get("choices", [])))
        tokens = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
        return None if tokens == [self._body["max_tokens"]] else f"cut off: {lines[-2][:200]}"
