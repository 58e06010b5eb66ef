"""Gain and cost of a batch in the padding: streams alone and beside it.

``python -m benchmarks padding --save``: alternating pairs in one server whose only decode bucket
has eight rows, then a batch alone against a closed loop of clients; see benchmarks/README.md.
Invariant: every figure of a report comes from one run of this command.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openai import OpenAI

from benchmarks.clients.http_sample import send_load
from benchmarks.clients.load import Load
from benchmarks.engines.server_process import ServerProcess, ServerSide, Serving
from benchmarks.engines.sides import server_side
from benchmarks.models.shapes import SHAPES, find_checkpoint
from benchmarks.models.text_checkpoint import prompt_text, text_checkpoint
from benchmarks.runner.command import Command, RunHeader, begin, heading, positive, say, spread

BUCKET = 8
_MAX_MODEL_LEN = 1024
_KV_CACHE_BYTES = 1 << 30
_BUDGET_S = 120.0
_LINES_PER_REQUEST = 3  # a row answers fewer while a stream has one answer
_GENERATED = re.compile(r"^vllm:generation_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)
_ROWS = {
    kind: re.compile(
        rf'^rbln_background_rows_total\{{[^}}]*kind="{kind}"[^}}]*\}} (\S+)$', re.MULTILINE
    )
    for kind in ("padding", "prompt")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Streams for a while; times in seconds.

    `gap` is the median over streams of a token's time after the first, `gap_p99` that of events.
    `earned` are answer tokens of lines in rows of the streams' steps, `read` are prompt tokens.
    Neither counts work before the first stream or after the last.
    """

    streams: int
    beside: bool
    seconds: float
    gap: float
    gap_p99: float
    first: float
    online_tokens: int
    earned: int
    read: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command; `idle` has tokens/s of a batch alone and of the closed loop."""

    model: str
    windows: list[Window]
    idle: list[tuple[float, float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks padding", description=__doc__)
    parser.add_argument("--model", default="15m", help="as of models/shapes.py (default: 15m)")
    parser.add_argument("--streams", nargs="+", type=positive, default=[3, 5, 7])
    parser.add_argument("--pairs", type=positive, default=5, help="default: 5")
    parser.add_argument("--requests", type=positive, default=6, help="of a stream (default: 6)")
    parser.add_argument("--prompt-tokens", type=positive, default=64)
    parser.add_argument("--output-tokens", type=positive, default=100)
    return Command("padding", parser, _measure, markdown).main(argv)


def _measure(args: argparse.Namespace, command: str) -> Run:
    begun = begin(command)
    checkpoint = find_checkpoint(args.model)
    path = text_checkpoint(checkpoint.path) if args.model in SHAPES else checkpoint.path
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rbln-padding-")))
        serving = Serving.of(path, _MAX_MODEL_LEN, _KV_CACHE_BYTES)
        server = ServerProcess(_side(folder / "data"), serving, folder / "server.log")
        stack.enter_context(server)
        stack.enter_context(server.awake())
        bench = _Bench(server, args)
        bench.window(args.streams[0], beside=False)
        windows = [window for n in args.streams for window in bench.pairs(n)]
        return Run(
            **begun,
            model=checkpoint.name,
            windows=windows,
            idle=[bench.idle() for _ in range(args.pairs)],
        )


def _side(data: Path) -> ServerSide:
    flags = ["--data-dir", str(data), "--max-num-seqs", str(BUCKET)]
    ours = server_side("ours").with_flags(*flags)
    return replace(ours, env={**ours.env, "VLLM_RBLN_DECODE_BATCH_BUCKET_MIN": str(BUCKET)})


class _Bench:
    """One server, and prompts without repetition."""

    def __init__(self, server: ServerProcess, args: argparse.Namespace) -> None:
        self._server = server
        self._args = args
        self._chooser = random.Random(0)
        self._url = f"http://127.0.0.1:{server.serving.port}"
        self._client = OpenAI(base_url=f"{self._url}/v1", api_key="none")

    def pairs(self, streams: int) -> Iterator[Window]:
        """Yield windows alone and beside a batch, in alternating order."""
        for number in range(self._args.pairs):
            for beside in (number % 2 == 0, number % 2 == 1):
                if not beside:
                    yield self.window(streams, beside=False)
                    continue
                with self._batch(_LINES_PER_REQUEST * BUCKET * self._args.requests):
                    yield self.window(streams, beside=True)

    def window(self, streams: int, *, beside: bool) -> Window:
        """Stream for a while."""
        bodies = [self._body() for _ in range(streams * self._args.requests)]
        before = self._rows()
        answer = self._loop(bodies, streams)
        earned, read = (now - then for now, then in zip(self._rows(), before, strict=True))
        answered = [request for request in answer["requests"] if request["first"] is not None]
        window = Window(
            streams=streams,
            beside=beside,
            seconds=answer["seconds"],
            gap=statistics.median(
                (r["last"] - r["first"]) / (r["tokens"] - 1) for r in answered if r["tokens"] > 1
            ),
            gap_p99=answer["gaps"][2],
            first=statistics.median(r["first"] - r["sent"] for r in answered),
            online_tokens=sum(request["tokens"] for request in answered),
            earned=earned,
            read=read,
        )
        rate = earned / window.seconds
        say(
            f"  {streams} streams, beside a batch: {beside}, {window.seconds:.0f} s, "
            f"{rate:.0f} tokens/s earned"
        )
        return window

    def idle(self) -> tuple[float, float]:
        """Return the tokens/s of a batch without clients, and of one client per row."""
        lines = BUCKET * self._args.requests
        began, before = time.perf_counter(), self._generated()
        with self._batch(lines, until="completed"):
            batch = (self._generated() - before) / (time.perf_counter() - began)
        answer = self._loop([self._body() for _ in range(lines)], BUCKET)
        loop = sum(request["tokens"] for request in answer["requests"]) / answer["seconds"]
        say(f"  a batch alone: {batch:.0f} tokens/s, clients: {loop:.0f}")
        return batch, loop

    @contextmanager
    def _batch(self, lines: int, until: str = "in_progress") -> Iterator[None]:
        """Start a batch, wait for the state `until`, and cancel it afterwards if it runs."""
        content = "".join(json.dumps(self._line(number)) + "\n" for number in range(lines))
        file = self._client.files.create(
            file=("lines.jsonl", io.BytesIO(content.encode())), purpose="batch"
        )
        batch = self._client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        self._wait(batch.id, until)
        before = self._generated()
        while until == "in_progress" and self._generated() == before:
            time.sleep(0.02)
        try:
            yield
        finally:
            if until == "in_progress":
                self._client.batches.cancel(batch.id)
                self._wait(batch.id, "cancelled")

    def _wait(self, batch: str, state: str) -> None:
        deadline = time.monotonic() + _BUDGET_S
        while (found := self._client.batches.retrieve(batch).status) != state:
            if found in ("failed", "expired", "completed") or time.monotonic() > deadline:
                raise self._server.error(f"has a batch that is {found}, not {state}")
            time.sleep(0.05)

    def _line(self, number: int) -> dict[str, Any]:
        body = {key: value for key, value in self._body().items() if not key.startswith("stream")}
        return {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}

    def _body(self) -> dict[str, Any]:
        prompt = prompt_text(self._chooser, self._args.prompt_tokens)
        return self._server.body(prompt, self._args.output_tokens)

    def _loop(self, bodies: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
        port = self._server.serving.port
        load = Load(port=port, bodies=bodies, concurrency=concurrency, budget_seconds=_BUDGET_S)
        return send_load(self._server, load)

    def _generated(self) -> int:
        return _sum(_GENERATED, self._metrics())

    def _rows(self) -> tuple[int, int]:
        page = self._metrics()
        return _sum(_ROWS["padding"], page), _sum(_ROWS["prompt"], page)

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"{self._url}/metrics") as page:
            return str(page.read().decode())


def _sum(sample: re.Pattern[str], page: str) -> int:
    return sum(int(float(value)) for value in sample.findall(page))


def markdown(run: Run) -> str:
    """Return the report."""
    lines = [
        *heading("A batch in the padding", run),
        f"- Model {run.model}, in bfloat16; one decode bucket of {BUCKET}. Ratios are beside a "
        "batch over alone, taken within a pair; medians, with the lowest and the highest.",
        "",
        "| streams | ms a token, alone | its ratio | gaps' p99, ratio | first token, ratio | "
        "streams' tokens/s, alone | tokens/s that the padding earned | of prompts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(run, n) for n in dict.fromkeys(window.streams for window in run.windows)]
    batch, loop = (statistics.median(side) for side in zip(*run.idle, strict=True))
    ratios = [one / other for one, other in run.idle]
    lines += [
        "",
        f"Without clients a batch makes {batch:.0f} tokens/s, {BUCKET} clients in a closed loop "
        f"{loop:.0f}: {spread(ratios, 3)} times.",
    ]
    return "\n".join(lines) + "\n"


def _row(run: Run, streams: int) -> str:
    alone, beside = (
        [w for w in run.windows if w.streams == streams and w.beside is kind]
        for kind in (False, True)
    )
    pairs = list(zip(alone, beside, strict=True))
    online = statistics.median(w.online_tokens / w.seconds for w in alone)
    return (
        f"| {streams} | {statistics.median(w.gap for w in alone) * 1e3:.2f} | "
        f"{spread([b.gap / a.gap for a, b in pairs], 3)} | "
        f"{spread([b.gap_p99 / a.gap_p99 for a, b in pairs], 3)} | "
        f"{spread([b.first / a.first for a, b in pairs], 3)} | {online:.0f} | "
        f"{statistics.median(w.earned / w.seconds for w in beside):.0f} | "
        f"{statistics.median(w.read / w.seconds for w in beside):.0f} |"
    )
