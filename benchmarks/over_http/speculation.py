"""Speculation against none over HTTP, alternating: seconds per token, and equality of texts.

``python -m benchmarks speculation --save --model FOLDER``, see benchmarks/README.md: a model whose
text repeats itself as real text does (`rbln-serve fetch smollm2` says where it lies). Invariant:
every figure of a report comes from one run of this command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.clients.event_stream import events
from benchmarks.engines.server_process import ServerProcess, ServerSide, Serving
from benchmarks.engines.sides import server_side
from benchmarks.models.shapes import find_checkpoint
from benchmarks.over_http.speculation_tasks import TASKS
from benchmarks.runner.command import (
    Command,
    RunHeader,
    add_model_and_batch,
    begin,
    heading,
    positive,
    rotated,
    say,
    started,
)

_CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": 7,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 8,
}
_MAX_MODEL_LEN = 6144
_KV_CACHE_BYTES = 2 << 30
_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer."""

    tokens: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A batch of one task on one side; `decode_s` once all prompts are in the prefix cache."""

    task: str
    batch: int
    round: int
    side: str
    seconds: float
    decode_s: float
    tokens: int
    same: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command."""

    model: str
    config: dict[str, Any]
    turns: list[Turn]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks speculation", description=__doc__)
    add_model_and_batch(parser, "15m")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rounds", type=positive, default=3, help="default: 3")
    parser.add_argument("--output-tokens", type=positive, default=400, help="default: 400")
    parser.add_argument("--config", type=json.loads, default=_CONFIG, help="--speculative-config")
    return Command("speculation", parser, _measure, markdown).main(argv)


def _measure(args: argparse.Namespace, command: str) -> Run:
    begun = begin(command)
    checkpoint = find_checkpoint(args.model)
    turns: list[Turn] = []
    processes = (
        ServerProcess(side, Serving.of(checkpoint.path, _MAX_MODEL_LEN, _KV_CACHE_BYTES))
        for side in _sides(args.config, max(args.batch))
    )
    with started(processes) as servers:
        number = 0
        for task in args.task:
            for batch in args.batch:
                for round_number in range(args.rounds):
                    turns += _round(servers, task, batch, round_number, number, args.output_tokens)
                    number += batch
    return Run(**begun, model=checkpoint.name, config=args.config, turns=turns)


def _sides(config: dict[str, Any], batch: int) -> list[ServerSide]:
    ours = server_side("ours")
    sizes = ("--max-num-seqs", str(batch))
    drafts = (*sizes, "--speculative-config", json.dumps(config))
    return [ours.with_flags(*sizes, name="off"), ours.with_flags(*drafts, name="on")]


def _round(
    servers: Sequence[ServerProcess],
    task: str,
    batch: int,
    round_number: int,
    number: int,
    most: int,
) -> list[Turn]:
    """Send the same requests to each side; the first side changes with the round."""
    bodies = [TASKS[task](number + row) for row in range(batch)]
    answers: dict[str, tuple[list[Answer], float, float]] = {}
    for server in rotated(servers, round_number):
        with server.awake(), ThreadPoolExecutor(batch) as threads:
            _, prompts_s = _ask_all(threads, server, bodies, 1)
            given, decode_s = _ask_all(threads, server, bodies, most)
        answers[server.side.name] = given, prompts_s, decode_s
    same = len({tuple(a.text for a in given) for given, _, _ in answers.values()}) == 1
    turns = []
    for side, (given, prompts_s, decode_s) in answers.items():
        turn = Turn(
            task=task,
            batch=batch,
            round=round_number,
            side=side,
            seconds=prompts_s + decode_s,
            decode_s=decode_s,
            tokens=sum(answer.tokens for answer in given),
            same=same,
        )
        say(f"  {task} x{batch} {side}: {turn.tokens} tokens, {decode_s:.2f} s, same text: {same}")
        turns.append(turn)
    return turns


def _ask_all(
    threads: ThreadPoolExecutor, server: ServerProcess, bodies: Sequence[dict[str, Any]], most: int
) -> tuple[list[Answer], float]:
    """Return the answers to concurrent requests, and the seconds."""
    began = time.perf_counter()
    given = list(threads.map(lambda body_fields: _ask(server, body_fields, most), bodies))
    return given, time.perf_counter() - began


def _ask(server: ServerProcess, body_fields: dict[str, Any], most: int) -> Answer:
    body = {
        "model": str(server.serving.text_model),
        "max_tokens": most,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **body_fields,
    }
    pieces, tokens = list[str](), 0
    for event in events(server, "/v1/chat/completions", body, _TIMEOUT_S):
        pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return Answer(tokens=tokens, text="".join(pieces))


def markdown(run: Run) -> str:
    """Return the report: medians over rounds of what speculation gains."""
    lines = [
        *heading("Speculation against none", run),
        f"- Model {run.model}, in bfloat16; `{json.dumps(run.config)}`.",
        "",
        "| task | batch | tokens | ms a token, off | ms a token, on | times as fast, decoding "
        "[range] | times as fast, whole answer | same text |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cells = dict.fromkeys((turn.task, turn.batch) for turn in run.turns)
    return "\n".join([*lines, *(_row(run, *cell) for cell in cells)]) + "\n"


def _row(run: Run, task: str, batch: int) -> str:
    off, on = (
        [t for t in run.turns if (t.task, t.batch, t.side) == (task, batch, side)]
        for side in ("off", "on")
    )
    gains = [a.decode_s / b.decode_s for a, b in zip(off, on, strict=True)]
    whole = [a.seconds / b.seconds for a, b in zip(off, on, strict=True)]
    each = [
        statistics.median(turn.decode_s / turn.tokens for turn in side) * 1e3 for side in (off, on)
    ]
    return (
        f"| {task} | {batch} | {on[0].tokens} | {each[0]:.2f} | {each[1]:.2f} | "
        f"{statistics.median(gains):.2f} [{min(gains):.2f}, {max(gains):.2f}] | "
        f"{statistics.median(whole):.2f} | {'yes' if all(t.same for t in on) else '**no**'} |"
    )
