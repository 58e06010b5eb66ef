"""Scenarios over HTTP: first tokens, output rates and memory of running servers."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.clients.http_sample import Meter, settle
from benchmarks.clients.load import RequestOutcome
from benchmarks.engines.server_process import ServerError, ServerProcess, Serving, free_port
from benchmarks.models.text_checkpoint import prompt_text
from benchmarks.runner.command import MAX_SAMPLES, say
from benchmarks.scenarios.bench import (
    Bench,
    Sample,
    Values,
    checkpoint_folder,
    firsts,
    prompts,
    send,
)

_FAIR_LONG, _FAIR_SHORT, _FAIR_COUNT = 7000, 40, 20
_BEHIND_S, _EVERY_S = 0.3, 0.25
_QUICK_LONG = 1500


# Five loads a round: a short prompt alone, the long one alone, 20 short ones alone, a short one
# 0.3 s behind the long one, and 20 short ones during the long one.


def run_fair_prefill(bench: Bench) -> None:
    long = _QUICK_LONG if bench.quick else _FAIR_LONG
    for model in bench.models:
        with bench.serving(model, 1024 * (1 + -(-long // 1024))) as servers:
            for number, server in bench.each_round(servers):
                for take in (_alone, _short_alone, _behind, _beside):
                    bench.measure(model, number, server, partial(take, server, long))
                _add_sum(bench, model, server.side.name, number)


def _alone(server: ServerProcess, long: int, seed: str) -> Values:
    return {"first token of 7,000 alone": (firsts(_send_long(server, seed, long, 0))[0], "s")}


def _short_alone(server: ServerProcess, _: int, seed: str) -> Values:
    one, *many = [server.body(p, 1) for p in prompts(f"alone {seed}", 1 + _FAIR_COUNT, _FAIR_SHORT)]
    return {
        "first token of 40 tokens alone": (firsts(send(server, [one])[1])[0], "s"),
        "20 short prompts alone, all first tokens": (firsts(send(server, many)[1])[-1], "s"),
    }


def _behind(server: ServerProcess, long: int, seed: str) -> Values:
    outcomes = _send_long(server, seed, long, 1)
    return {"first token of 40 tokens behind 7,000": (firsts(outcomes[1:])[0], "s")}


def _beside(server: ServerProcess, long: int, seed: str) -> Values:
    outcomes = _send_long(server, seed, long, _FAIR_COUNT)
    short = firsts(outcomes[1:])
    name = "first token of 20 short prompts beside 7,000"
    return {
        f"{name}, p50": (short[len(short) // 2], "s"),
        f"{name}, p99": (short[-1], "s"),
        "first token of 7,000 beside 20 short prompts": (firsts(outcomes[:1])[0], "s"),
    }


def _send_long(server: ServerProcess, seed: str, long: int, count: int) -> list[RequestOutcome]:
    """Send the long prompt, and ``count`` short ones after it."""
    short = prompts(f"short {seed} {count}", count, _FAIR_SHORT)
    texts = [*prompts(f"long {seed} {count}", 1, long), *short]
    at = [0.0, *(_BEHIND_S + _EVERY_S * place for place in range(count))]
    return send(server, [server.body(text, 1) for text in texts], at=at)[1]


def _add_sum(bench: Bench, model: str, side: str, number: int) -> None:
    names = (
        "first token of 7,000 beside 20 short prompts",
        "first token of 7,000 alone",
        "20 short prompts alone, all first tokens",
    )
    beside, alone, work = (bench.value(model, side, number, name) for name in names)
    share = beside / (alone + work) if beside and alone and work else None
    bench.add(model, side, number, f"{names[0]}, over the sum of both alone", share, "×")


JsonFields = dict[str, Any]
_RATE_PROMPT, _SAMPLING_LENGTH = 32, 1024
_SAMPLING_TOKENS = {"1.2b": 24}
_MANY_TOKENS = 96
# A text whose closing quote random weights hardly ever choose.
_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
_WARM = {"temperature": 1.0}
_SAMPLING_FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": _WARM,
    "temperature 0.7 and top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top-k 50": _WARM | {"top_k": 50},
    "min-p 0.05": _WARM | {"min_p": 0.05},
    "seed": _WARM | {"seed": 1},
    "repetition penalty": {"repetition_penalty": 1.1},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logprobs 5": {"logprobs": 5},
    "JSON schema": _WARM
    | {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "text", "schema": _SCHEMA},
        }
    },
}


def run_sampling(bench: Bench) -> None:
    for model in bench.models:
        tokens = 16 if bench.quick else _SAMPLING_TOKENS.get(model, _MANY_TOKENS)
        with bench.serving(model, _SAMPLING_LENGTH, "--max-num-seqs", "8") as servers:
            for number, server in bench.each_round(servers):
                for name, fields in _SAMPLING_FIELDS.items():
                    for count in (1, 8):
                        take = partial(_rate, server, name, count, tokens, fields)
                        bench.measure(model, number, server, take)


def _rate(
    server: ServerProcess, name: str, count: int, tokens: int, fields: JsonFields, seed: str
) -> Values:
    texts = prompts(f"{name} {seed} {count}", count, _RATE_PROMPT)
    seconds, outcomes = send(server, [server.body(text, tokens) | fields for text in texts])
    rate = sum(outcome.tokens for outcome in outcomes) / seconds
    return {f"{name}, {count} at once": (rate, "tokens/s")}


_AT_ONCE_LENGTH, _AT_ONCE = 8192, (1, 8, 32, 64)
_AT_ONCE_PROMPT, _AT_ONCE_OUTPUT = 32, 128
_LENGTHS = (40, 1000, 4000, 7000)


def run_concurrency(bench: Bench) -> None:
    lengths, tokens = (_LENGTHS[:2], 16) if bench.quick else (_LENGTHS, _AT_ONCE_OUTPUT)
    length = 2048 if bench.quick else _AT_ONCE_LENGTH
    for model in bench.models:
        with bench.serving(model, length, "--max-num-seqs", str(max(_AT_ONCE))) as servers:
            for number, server in bench.each_round(servers):
                for size in lengths:
                    bench.measure(model, number, server, partial(_first_of_length, server, size))
                for count in _AT_ONCE:
                    take = partial(_rate_at_once, server, count, tokens)
                    bench.measure(model, number, server, take)


def _first_of_length(server: ServerProcess, length: int, seed: str) -> Values:
    bodies = [server.body(text, 1) for text in prompts(f"{seed} {length}", 1, length)]
    return {f"first token of {length:,} tokens": (firsts(send(server, bodies)[1])[0], "s")}


def _rate_at_once(server: ServerProcess, count: int, tokens: int, seed: str) -> Values:
    texts = prompts(f"{seed} at once {count}", count, _AT_ONCE_PROMPT)
    meter = Meter(server)
    seconds, outcomes = send(server, [server.body(text, tokens) for text in texts])
    used, total = meter.read()[0], sum(outcome.tokens for outcome in outcomes)
    gaps = [outcome.itl for outcome in outcomes if outcome.itl is not None]
    place = f"{count} at once"
    values: Values = {
        f"output, {place}": (total / seconds, "tokens/s"),
        f"HTTP process per token, {place}": (1e6 * used.http / total, "µs"),
    }
    # A client that others delay may read a short text as one event.
    if gaps:
        values[f"time per token, {place}"] = (1000 * statistics.median(gaps), "ms")
    return values


_SHAPES_LENGTH, _SHAPES_LONG = 2048, 1000


def run_shapes(bench: Bench) -> None:
    """Fill the figures; they are under the whole name in `MODELS`."""
    tokens = 16 if bench.quick else 96
    for name in bench.models:
        checkpoint, _, dtype = name.partition(":")
        flags = ("--dtype", dtype or "bfloat16", "--max-num-seqs", "8")
        with bench.serving(checkpoint, _SHAPES_LENGTH, *flags) as servers:
            for number, server in bench.each_round(servers):
                bench.measure(name, number, server, partial(_first_of_shape, server))
                for count in (1, 8):
                    take = partial(_rate, server, "output", count, tokens, {})
                    bench.measure(name, number, server, take)


def _first_of_shape(server: ServerProcess, seed: str) -> Values:
    bodies = [server.body(text, 1) for text in prompts(seed, 1, _SHAPES_LONG)]
    return {"first token of 1,000 tokens": (firsts(send(server, bodies)[1])[0], "s")}


_STREAMS = (8, 16, 32, 64, 128, 256)
_MEMORY_LENGTH, _MEMORY_PROMPT, _MEMORY_OUTPUT = 1024, 32, 128
_MIXED_MINUTES = ("two", 2), ("ten", 10)
_MIB = 1 / 2**20


def run_memory(bench: Bench) -> None:
    """Fill the figures; each model has one round, because memory does not shrink between two."""
    minute = 1.0 if bench.quick else 60.0
    seats = ("--max-num-seqs", str(max(_STREAMS)))
    for model in bench.models:
        with bench.serving(model, _MEMORY_LENGTH, *seats) as servers:
            for server in servers:
                for count in _STREAMS:
                    bench.measure(model, 0, server, partial(_streams, server, count))
                    _add_memory(bench, model, server, f"{count} streams")
        with bench.serving(model, _MEMORY_LENGTH) as servers:
            for server in servers:
                _mixed(bench, model, server, minute)


def _streams(server: ServerProcess, count: int, seed: str) -> Values:
    # Two requests for each stream, one after the other.
    texts = prompts(f"streams {count} {seed}", 2 * count, _MEMORY_PROMPT)
    bodies = [server.body(text, _MEMORY_OUTPUT) for text in texts]
    seconds, outcomes = send(server, bodies, concurrency=count)
    return {f"output, {count} streams": (sum(o.tokens for o in outcomes) / seconds, "tokens/s")}


def _add_memory(bench: Bench, model: str, server: ServerProcess, load: str) -> None:
    # Memory is added apart from the rates: other processes disturb a rate, not what is in memory.
    used = server.memory().pss * _MIB
    bench.add(model, server.side.name, 0, f"memory after {load}", used, "MiB")


def _mixed(bench: Bench, model: str, server: ServerProcess, minute: float) -> None:
    """Add the memory after two and ten minutes of prompts and answers of many lengths."""
    chooser = random.Random(model)
    with server.awake():
        began = time.monotonic()
        for name, minutes in _MIXED_MINUTES:
            while time.monotonic() - began < minutes * minute:
                bench.check_time()
                send(server, [_mixed_body(server, chooser) for _ in range(32)], concurrency=16)
            _add_memory(bench, model, server, f"{name} minutes of mixed load")


def _mixed_body(server: ServerProcess, chooser: random.Random) -> dict[str, object]:
    prompt = prompt_text(chooser, chooser.choice((8, 40, 200, 700)))
    temperature = chooser.choice((0.0, 1.0))
    return server.body(prompt, chooser.choice((1, 16, 128))) | {"temperature": temperature}


_TIERS_LENGTH = 8192
_TIERS_TOKENS = (300, 1000, 4000)


def run_kv_tiers(bench: Bench) -> None:
    """Fill the figures. The folder is in the temporary one, and its files in the page cache."""
    for model in bench.models:
        tier = {"type": "fs", "root_dir": str(bench.folder / f"{model}-kv")}
        flags = (
            "--kv-transfer-config",
            json.dumps(
                {
                    "kv_connector": "OffloadingConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"secondary_tiers": [tier]},
                }
            ),
        )
        for take in (_computed_and_kept, _from_files):
            with bench.serving(model, _TIERS_LENGTH, *flags) as servers:
                for number, server in bench.each_round(servers):
                    for tokens in _TIERS_TOKENS:
                        bench.measure(model, number, server, partial(take, server, tokens))


def _computed_and_kept(server: ServerProcess, tokens: int, seed: str) -> Values:
    """Measure a prompt twice, and store those of every attempt of this round after a restart."""
    for attempt in range(MAX_SAMPLES):
        _prompt_seconds(server, tokens, f"files {seed.split()[0]} {attempt}")
    own = f"computed {seed}"
    return {
        f"first token of {tokens:,}, computed": (_prompt_seconds(server, tokens, own), "s"),
        f"first token of {tokens:,}, in the prefix cache": (
            _prompt_seconds(server, tokens, own),
            "s",
        ),
    }


def _from_files(server: ServerProcess, tokens: int, seed: str) -> Values:
    return {
        f"first token of {tokens:,}, in files": (
            _prompt_seconds(server, tokens, f"files {seed}"),
            "s",
        )
    }


def _prompt_seconds(server: ServerProcess, tokens: int, seed: str) -> float:
    (prompt,) = prompts(f"{tokens} {seed}", 1, tokens)
    return firsts(send(server, [server.body(prompt, 1)])[1])[0]


_PAIR_LENGTH = 8192
_PAIR_KV_BYTES = 1 << 30
_PAIR_TOKENS = (300, 1000, 4000)
_PAIR_BUDGET_S = 300.0


class Trio(NamedTuple):
    """The server that does both, and the two that share the work."""

    alone: ServerProcess
    prefill: ServerProcess
    decode: ServerProcess


# All servers are on this host and share its cores, so what is measured is the cost of the two
# requests and of the transfer. On hosts of their own, the decode server's cores are not used by
# prompts. Needs nixl (requirements/nixl.txt).


def run_prefill_decode(bench: Bench) -> None:
    """Fill the figures; raises ServerError where nixl is missing."""
    for model in bench.models:
        with _pair_serving(bench, model) as servers:
            with ExitStack() as awake:
                for server in servers:
                    awake.enter_context(server.awake())
                # The first transfer of a pair begins with a handshake.
                for server in (servers.prefill, servers.decode):
                    settle(server)
                _apart(servers, prompts("handshake", 1, 64)[0])
            for number in range(bench.rounds):
                for tokens in _PAIR_TOKENS[:2] if bench.quick else _PAIR_TOKENS:
                    bench.check_time()
                    once = partial(_pair_sample, servers, number, tokens)
                    bench.take(model, "ours", number, once)


@contextmanager
def _pair_serving(bench: Bench, model: str) -> Iterator[Trio]:
    found = importlib.util.find_spec("nixl")
    if found is None or found.origin is None:
        raise ServerError("nixl is not installed: requirements/nixl.txt")
    path = os.pathsep.join((str(Path(found.origin).parents[1]), os.environ.get("PYTHONPATH", "")))
    folder = checkpoint_folder(model)
    positions = json.dumps({"max_position_embeddings": _PAIR_LENGTH})
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
            serving = Serving.of(folder, _PAIR_LENGTH, _PAIR_KV_BYTES)
            say(f"  {model}: starting {name}")
            server = ServerProcess(side, serving, bench.folder / f"{model}-{name}.log")
            servers.append(stack.enter_context(server))
        yield Trio(*servers)


def _pair_sample(servers: Trio, number: int, tokens: int, attempt: int) -> Sample:
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
    connection = http.client.HTTPConnection(*address, timeout=_PAIR_BUDGET_S)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != http.HTTPStatus.OK:
        raise server.error(f"answered {answer.status}: {answer.read()[:200]!r}")
    return answer
