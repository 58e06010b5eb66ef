"""Prefix hits of requests that a router sends to several servers, by its view of their caches.

``python -m benchmarks kv_routing --save``. Requests of several groups, each with a common prefix,
go one by one to servers whose KV blocks are much longer than the prefixes. The router knows the
units of KV events, whole blocks alone (upstream's events), or nothing. It sends a request where
its predicted hit is longest, and to the server with the fewest prompt tokens so far among equals.
Invariant: every way of routing gets the same requests in the same order, on empty caches.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clients.kv_events import KvSubscriber
from benchmarks.engines.server_process import ServerProcess, Serving, free_port
from benchmarks.engines.sides import server_side
from benchmarks.models.shapes import find_checkpoint
from benchmarks.models.text_checkpoint import text_checkpoint
from benchmarks.runner.command import Command, RunHeader, begin, heading, positive, say

_TOKEN_IDS = range(10, 1000)
_SETTLE_MS = 100

_UNITS, _BLOCKS, _NONE = "units of KV events", "whole blocks of KV events", "no events"
_WAYS = (_UNITS, _BLOCKS, _NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request: tokens of its prompt and of its group's prefix, and what was reused."""

    prompt: int
    shared: int
    server: int
    predicted: int
    cached: int
    is_first: bool
    """No request of its group came before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command; `sent` has the requests in their order by way of routing."""

    model: str
    servers: int
    blocks: int
    block_tokens: int
    groups: int
    shared_tokens: tuple[int, int]
    own_tokens: int
    sent: dict[str, list[Sent]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kv_routing", description=__doc__)
    parser.add_argument("--model", default="15m", help="as of models/shapes.py (default: 15m)")
    parser.add_argument("--servers", type=positive, default=2, help="default: 2")
    parser.add_argument("--blocks", type=positive, default=6, help="KV blocks of a server (6)")
    parser.add_argument("--block-tokens", type=positive, default=4096, help="default: 4096")
    parser.add_argument("--groups", type=positive, default=8, help="common prefixes (8)")
    parser.add_argument("--requests", type=positive, default=8, help="of a group (8)")
    parser.add_argument("--shared-tokens", type=positive, nargs=2, default=[300, 3000])
    parser.add_argument("--own-tokens", type=positive, default=50, help="of a request (50)")
    return Command("kv_routing", parser, _measure, markdown).main(argv)


def _measure(args: argparse.Namespace, command: str) -> Run:
    begun = begin(command)
    checkpoint = find_checkpoint(args.model)
    path = text_checkpoint(checkpoint.path)
    sent: dict[str, list[Sent]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rbln-routing-")))
        workers = [
            _Worker(stack, path, folder / f"{number}.log", args) for number in range(args.servers)
        ]
        for way in _WAYS:
            for worker in workers:
                worker.clear()
            sent[way] = [_send(workers, one, way, args) for one in _requests(args)]
            say(f"{way}: {_reused(sent[way]):.1%} of prompt tokens reused")
    return Run(
        **begun,
        model=checkpoint.name,
        servers=args.servers,
        blocks=args.blocks,
        block_tokens=args.block_tokens,
        groups=args.groups,
        shared_tokens=(args.shared_tokens[0], args.shared_tokens[1]),
        own_tokens=args.own_tokens,
        sent=sent,
    )


@dataclass(frozen=True, slots=True)
class _Prompt:
    tokens: list[int]
    shared: int
    is_first: bool


def _requests(args: argparse.Namespace) -> list[_Prompt]:
    """Return the same prompts for every way of routing; prefix lengths are spread evenly."""
    chooser = random.Random(0)
    low, high = args.shared_tokens
    step = (high - low) / max(1, args.groups - 1)
    lengths = [round(low + step * number) for number in range(args.groups)]
    prefixes = [chooser.choices(_TOKEN_IDS, k=length) for length in lengths]
    order = [number for number in range(args.groups) for _ in range(args.requests)]
    chooser.shuffle(order)
    seen: set[int] = set()
    prompts = []
    for group in order:
        own = chooser.choices(_TOKEN_IDS, k=args.own_tokens)
        prompts.append(_Prompt(prefixes[group] + own, lengths[group], group not in seen))
        seen.add(group)
    return prompts


class _Worker:
    """One server, and the router's subscription to its events."""

    def __init__(
        self, stack: ExitStack, checkpoint: Path, log: Path, args: argparse.Namespace
    ) -> None:
        events, replay = free_port(), free_port()
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "topic": f"kv@127.0.0.1:{events}@{args.model}",
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
        }
        side = server_side("ours").with_flags(
            *("--kv-events-config", json.dumps(config)),
            *("--block-size", str(args.block_tokens), "--max-num-seqs", "2"),
            *("--num-gpu-blocks-override", str(args.blocks + 1)),
        )
        serving = Serving.of(checkpoint, args.block_tokens, 1 << 30)
        self._server = stack.enter_context(ServerProcess(side, serving, log))
        stack.enter_context(self._server.awake())
        addresses = (f"tcp://127.0.0.1:{port}" for port in (events, replay))
        self._router = KvSubscriber(*addresses)
        stack.callback(self._router.close)
        self.tokens = 0
        """Prompt tokens since the last `clear`."""

    def clear(self) -> None:
        """Empty the prefix cache."""
        assert self._post("/reset_prefix_cache", {})["success"]
        self._router.read(_SETTLE_MS)
        self._router.catch_up()
        self.tokens = 0

    def hit(self, tokens: Sequence[int]) -> int:
        """Return the tokens that events say would be reused."""
        return self._router.index.hit(tokens)

    def send(self, tokens: list[int]) -> int:
        """Send a prompt; return its tokens that were reused."""
        body = {**self._server.body("", 1), "prompt": tokens, "stream": False}
        body.pop("stream_options", None)
        usage = self._post("/v1/completions", body)["usage"]
        self.tokens += len(tokens)
        self._router.read(_SETTLE_MS)
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.serving.port, timeout=120)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != http.HTTPStatus.OK:
                raise self._server.error(f"answered {answer.status}: {text.decode()}")
            return json.loads(text)
        finally:
            connection.close()


def _known(way: str, hit: int, block: int) -> int:
    """Return the tokens of a hit that are in a router's view."""
    if way == _NONE:
        return 0
    return hit if way == _UNITS else hit // block * block


def _send(workers: Sequence[_Worker], prompt: _Prompt, way: str, args: argparse.Namespace) -> Sent:
    hits = [_known(way, worker.hit(prompt.tokens), args.block_tokens) for worker in workers]
    chosen = min(range(len(workers)), key=lambda n: (-hits[n], workers[n].tokens, n))
    return Sent(
        prompt=len(prompt.tokens),
        shared=prompt.shared,
        server=chosen,
        predicted=hits[chosen],
        cached=workers[chosen].send(prompt.tokens),
        is_first=prompt.is_first,
    )


def _reused(sent: Sequence[Sent]) -> float:
    return sum(one.cached for one in sent) / sum(one.prompt for one in sent)


def markdown(run: Run) -> str:
    """Return the report."""
    low, high = run.shared_tokens
    lines = [
        *heading("Routing by KV events", run),
        f"- Model {run.model}, {run.servers} servers, each with {run.blocks} KV blocks of "
        f"{run.block_tokens:,} tokens. {run.groups} groups of requests share prefixes of "
        f"{low:,} to {high:,} tokens; {run.own_tokens} more tokens are each request's own.",
        "- Reused: tokens of prompts that were prefix hits (`cached_tokens`). Of what could be: "
        "the same, against all common prefixes but those of each group's first request.",
        "- Exact: requests whose hit was the predicted one.",
        "",
        "| the router knows | requests | tokens reused | of what could be | exact | per server |",
        "|---|---|---|---|---|---|",
    ]
    for way, sent in run.sent.items():
        best = sum(one.shared for one in sent if not one.is_first)
        share = sum(one.cached for one in sent) / best if best else 0.0
        exact = sum(one.predicted == one.cached for one in sent)
        loads = [sum(one.server == number for one in sent) for number in range(run.servers)]
        lines.append(
            f"| {way} | {len(sent)} | {_reused(sent):.1%} | {share:.1%} | {exact} | "
            f"{' / '.join(map(str, loads))} |"
        )
    return "\n".join(lines) + "\n"
