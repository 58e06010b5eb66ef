"""First token of a long prompt over HTTP, alone and beside a stream, and the stream's gaps.

``python -m benchmarks long_prompt --save``. Ours and vLLM's CPU backend on every core, servers with
their defaults, alternating; no prefix is hit. Invariant: every figure of a report comes from one
run of this command.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.clients.client_process import ClientProcess
from benchmarks.clients.http_sample import Meter, send_load, settle
from benchmarks.clients.load import Load
from benchmarks.engines.server_process import ServerProcess, ServerSide, Serving
from benchmarks.engines.sides import server_sides
from benchmarks.models.shapes import find_checkpoint
from benchmarks.models.text_checkpoint import prompt_text, text_checkpoint
from benchmarks.runner.command import (
    Command,
    RunHeader,
    begin,
    disturbance,
    heading,
    positive,
    rotated,
    say,
    spread,
    started,
)

_SIDES = ("ours", "vllm-cpu-all-cores")
_KV_CACHE_BYTES = 1 << 30
_STREAM_PROMPT_TOKENS, _STREAM_TOKENS = 32, 400
_BEFORE_S = 1.0
_BUDGET_S = 180.0
_PREPARATION_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Seconds to the long prompt's first token; `gaps` of the stream beside it, if there is one.

    They are the median, p95, p99 and longest of the whole stream, which begins before the prompt.
    """

    round: int
    side: str
    first: float
    gaps: list[float]
    other_busy_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """All samples of one command."""

    model: str
    tokens: int
    sides: dict[str, str]
    samples: list[Sample]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks long_prompt", description=__doc__)
    parser.add_argument("--model", default="160m", help="as of models/shapes.py (default: 160m)")
    parser.add_argument("--tokens", type=positive, default=7000, help="default: 7000")
    parser.add_argument("--rounds", type=positive, default=3, help="default: 3")
    return Command("long_prompt", parser, _measure, markdown).main(argv)


def _measure(args: argparse.Namespace, command: str) -> Run:
    begun = begin(command)
    checkpoint = find_checkpoint(args.model)
    sides = [_with_positions(server_sides()[name], args.tokens) for name in _SIDES]
    path = text_checkpoint(checkpoint.path)
    processes = (
        ServerProcess(side, Serving.of(path, _length(args.tokens), _KV_CACHE_BYTES))
        for side in sides
    )
    with started(processes) as servers:
        samples = []
        for number in range(args.rounds):
            for beside in (False, True):
                samples += [
                    _sample(server, number, args.tokens, beside=beside)
                    for server in rotated(servers, number)
                ]
    return Run(
        **begun,
        model=checkpoint.name,
        tokens=args.tokens,
        sides={side.name: side.note for side in sides},
        samples=samples,
    )


def _with_positions(side: ServerSide, tokens: int) -> ServerSide:
    """Return the side for texts longer than its checkpoint's context; the weights are random."""
    flags = ("--hf-overrides", json.dumps({"max_position_embeddings": _length(tokens)}))
    return side.with_flags(*flags)


def _length(tokens: int) -> int:
    return -(-(tokens + _STREAM_TOKENS) // 1024) * 1024


def _sample(server: ServerProcess, number: int, tokens: int, *, beside: bool) -> Sample:
    chooser = random.Random(f"{number} {beside}")
    warm = _load(server, prompt_text(chooser, _PREPARATION_TOKENS), _PREPARATION_TOKENS)
    stream = _load(server, prompt_text(chooser, _STREAM_PROMPT_TOKENS), _STREAM_TOKENS)
    prompt = _load(server, prompt_text(chooser, tokens), 1)
    with server.awake():
        settle(server)
        # Caches and pages of a server that slept are cold, unlike those of a busy one.
        send_load(server, warm)
        meter = Meter(server)
        streaming = ClientProcess("benchmarks.clients.load", asdict(stream)) if beside else None
        if streaming is not None:
            time.sleep(_BEFORE_S)
        prompted = send_load(server, prompt)["requests"][0]
        streamed: dict[str, Any] = {"gaps": []} if streaming is None else streaming.end()
        _, other_busy_cores = meter.read()
    if prompted["first"] is None or (beside and not streamed["gaps"]):
        raise server.error("streamed nothing")
    sample = Sample(
        round=number,
        side=server.side.name,
        first=prompted["first"] - prompted["sent"],
        gaps=streamed["gaps"],
        other_busy_cores=other_busy_cores,
    )
    gaps = f", the stream's longest gap {1000 * streamed['gaps'][3]:.0f} ms" if beside else ""
    say(f"  round {number} {sample.side}: first token after {sample.first:.2f} s{gaps}")
    return sample


def _load(server: ServerProcess, prompt: str, output_tokens: int) -> Load:
    return Load(
        port=server.serving.port,
        bodies=[server.body(prompt, output_tokens)],
        concurrency=1,
        budget_seconds=_BUDGET_S,
    )


def markdown(run: Run) -> str:
    """Return the report."""
    lines = [
        *heading(f"A prompt of {run.tokens} tokens", run),
        *(f"- `{name}`: {note}." for name, note in run.sides.items()),
        f"- {disturbance([sample.other_busy_cores for sample in run.samples])}",
        "",
        f"Model {run.model}. Medians of the rounds with their range; ratios are of one round's "
        f"times, above 1 `{_SIDES[0]}` is faster. The stream of {_STREAM_TOKENS} tokens begins "
        f"{_BEFORE_S:g} s before the prompt; its gaps are those between any two of its tokens.",
        "",
        "| side | | first token, s | / ours | median gap, ms | p99 | longest |",
        "|---|---|---|---|---|---|---|",
        *(_line(run, side, beside) for beside in (False, True) for side in run.sides),
    ]
    return "\n".join(lines) + "\n"


def _line(run: Run, side: str, beside: bool) -> str:
    mine, ours = (
        [s for s in run.samples if s.side == name and bool(s.gaps) == beside]
        for name in (side, _SIDES[0])
    )
    ratios = [a.first / b.first for a, b in zip(mine, ours, strict=True)]
    cells = [side, "beside a stream" if beside else "alone"]
    cells += [spread([s.first for s in mine]), spread(ratios)]
    for place in (0, 2, 3):
        gaps = [1000 * s.gaps[place] for s in mine if s.gaps]
        cells.append(f"{statistics.median(gaps):.1f}" if gaps else "–")
    return f"| {' | '.join(cells)} |"
