"""First tokens of prompts that one server reads and another answers, against one server.

All servers are on this host and share its cores, so what is measured is the cost of the two
requests and of the transfer. On hosts of their own, the decode server's cores are not used by
prompts. Needs nixl (requirements/nixl.txt).
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.clients.http_sample import Meter, settle
from benchmarks.engines.server_process import ServerError, ServerProcess, Serving, free_port
from benchmarks.runner.command import say
from benchmarks.scenarios.bench import Bench, Sample, checkpoint_folder, prompts

MODELS = ("160m",)
SIDES = ("ours",)
MINUTES = 4
_LENGTH = 8192
_KV_CACHE_BYTES = 1 << 30
_TOKENS = (300, 1000, 4000)
_BUDGET_S = 300.0


class Trio(NamedTuple):
    """The server that does both, and the two that share the work."""

    alone: ServerProcess
    prefill: ServerProcess
    decode: ServerProcess


def run(bench: Bench) -> None:
    """Fill the figures; raises ServerError where nixl is missing."""
    for model in bench.models:
        with _serving(bench, model) as servers:
            with ExitStack() as awake:
                for server in servers:
                    awake.enter_context(server.awake())
                # The first transfer of a pair begins with a handshake.
                for server in (servers.prefill, servers.decode):
                    settle(server)
                _apart(servers, prompts("handshake", 1, 64)[0])
            for number in range(bench.rounds):
                for tokens in _TOKENS[:2] if bench.quick else _TOKENS:
                    bench.check_time()
                    once = partial(_sample, servers, number, tokens)
                    bench.take(model, "ours", number, once)


@contextmanager
def _serving(bench: Bench, model: str) -> Iterator[Trio]:
    found = importlib.util.find_spec("nixl")
    if found is None or found.origin is None:
        raise ServerError("nixl is not installed: requirements/nixl.txt")
    path = os.pathsep.join((str(Path(found.origin).parents[1]), os.environ.get("PYTHONPATH", "")))
    folder = checkpoint_folder(model)
    positions = json.dumps({"max_position_embeddings": _LENGTH})
    bench.described["ours"] = f"{bench.side('ours').note}; NixlConnector on two of three servers"
    with ExitStack() as stack:
        servers = []
        for name, role in (("alone", None), ("prefill", "kv_producer"), ("decode", "kv_consumer")):
            side = bench.side("ours").with_flags("--hf-overrides", positions, name=name)
            if role is not None:
                transfer = {"kv_connector": "NixlConnector", "kv_role": role}
                side = side.with_flags("--kv-transfer-config", json.dumps(transfer))
                channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "PYTHONPATH": path}
                side = replace(side, env={**side.env, **channel})
            serving = Serving.of(folder, _LENGTH, _KV_CACHE_BYTES)
            say(f"  {model}: starting {name}")
            server = ServerProcess(side, serving, bench.folder / f"{model}-{name}.log")
            servers.append(stack.enter_context(server))
        yield Trio(*servers)


def _sample(servers: Trio, number: int, tokens: int, attempt: int) -> Sample:
    """Measure one server and the pair, the other one first in every round."""
    values: dict[str, tuple[float, str]] = {}
    busy = 0.0
    for name in sorted(("one server", "two servers"), reverse=bool(number % 2)):
        (prompt,) = prompts(f"{tokens} {number} {attempt} {name}", 1, tokens)
        used = servers[:1] if name == "one server" else servers[1:]
        with ExitStack() as awake:
            for server in used:
                awake.enter_context(server.awake())
                settle(server)
            meters, began = [Meter(server) for server in used], time.perf_counter()
            if name == "one server":
                seconds = _stream(servers.alone, prompt, {})
            else:
                until_read, seconds = _apart(servers, prompt)
                values[f"prefill server's answer to {tokens:,}"] = (until_read, "s")
            values[f"first token of {tokens:,}, {name}"] = (seconds, "s")
            # A meter counts the other server as another process.
            others = [meter.read()[0] for meter in meters[1:]]
            own = sum(cpu.http + cpu.engine for cpu in others) / (time.perf_counter() - began)
            busy = max(busy, meters[0].read()[1] - own)
    return Sample(values, busy)


def _apart(servers: Trio, prompt: str) -> tuple[float, float]:
    """Return seconds to the prefill server's answer, and to the decode server's first token."""
    began = time.perf_counter()
    offer = {"kv_transfer_params": {"do_remote_decode": True}}
    body = {**servers.prefill.body(prompt, 1), "stream": False, **offer}
    body.pop("stream_options", None)
    answer = _post(servers.prefill, body)
    params = json.loads(answer.read())["kv_transfer_params"]
    until_read = time.perf_counter() - began
    return until_read, until_read + _stream(servers.decode, prompt, {"kv_transfer_params": params})


def _stream(server: ServerProcess, prompt: str, fields: Mapping[str, Any]) -> float:
    """Return the seconds to the first token of a stream, which is read to its end."""
    began, first = time.perf_counter(), None
    answer = _post(server, {**server.body(prompt, 4), **fields})
    while line := answer.readline():
        if first is None and line.startswith(b"data:"):
            first = time.perf_counter() - began
    if first is None:
        raise server.error("a stream had no token")
    return first


def _post(server: ServerProcess, body: Mapping[str, Any]) -> http.client.HTTPResponse:
    address = ("127.0.0.1", server.serving.port)
    connection = http.client.HTTPConnection(*address, timeout=_BUDGET_S)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != http.HTTPStatus.OK:
        raise server.error(f"answered {answer.status}: {answer.read()[:200]!r}")
    return answer
