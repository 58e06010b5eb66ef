"""Memory and output rate of ours with 8 to 256 streams, and memory during ten minutes of load."""

from __future__ import annotations

import random
import time
from functools import partial

from benchmarks.engines.server_process import ServerProcess
from benchmarks.models.text_checkpoint import prompt_text
from benchmarks.scenarios.bench import Bench, Values, prompts, send

MODELS = ("15m", "160m")
SIDES = ("ours",)
MINUTES = 30
_STREAMS = (8, 16, 32, 64, 128, 256)
_LENGTH, _PROMPT_TOKENS, _OUTPUT_TOKENS = 1024, 32, 128
_MIXED_MINUTES = ("two", 2), ("ten", 10)
_MIB = 1 / 2**20
# On demand, the pages of the KV pool that more streams touch would hide what else they take.
_RESERVED = ("--additional-config", '{"rbln": {"kv_cache_pages": "reserved"}}')


def run(bench: Bench) -> None:
    """Fill the figures; each model has one round, because memory does not shrink between two."""
    minute = 1.0 if bench.quick else 60.0
    seats = ("--max-num-seqs", str(max(_STREAMS)))
    for model in bench.models:
        with bench.serving(model, _LENGTH, *_RESERVED, *seats) as servers:
            for server in servers:
                for count in _STREAMS:
                    bench.measure(model, 0, server, partial(_streams, server, count))
                    _add_memory(bench, model, server, f"{count} streams")
        with bench.serving(model, _LENGTH, *_RESERVED) as servers:
            for server in servers:
                _mixed(bench, model, server, minute)


def _streams(server: ServerProcess, count: int, seed: str) -> Values:
    # Two requests for each stream, one after the other.
    texts = prompts(f"streams {count} {seed}", 2 * count, _PROMPT_TOKENS)
    bodies = [server.body(text, _OUTPUT_TOKENS) for text in texts]
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
