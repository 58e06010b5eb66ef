"""Buckets that change under load: gaps, answers, failures and memory over ten changes.

``python -m benchmarks bucket_changes --save``: streams alone, then the same load with a change
every few seconds and every seventh stream closed early; then a fresh server for each set answers
the same prompts. Invariant: every figure of a report comes from one run of this command.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.engines.server_process import ServerProcess, ServerSide, Serving
from benchmarks.engines.sides import server_side
from benchmarks.models.shapes import SHAPES, find_checkpoint
from benchmarks.models.text_checkpoint import prompt_text, text_checkpoint
from benchmarks.runner.command import Command, RunHeader, begin, heading, positive, say

Sizes = dict[str, list[int]]
SETS: tuple[Sizes, ...] = (
    {"decode": [3, 9, 32], "prefill": [16, 32, 64, 128, 256]},
    {"decode": [6, 24, 32], "prefill": [40, 256]},
    {"decode": [1, 2, 4, 8, 16, 32], "prefill": [16, 32, 64, 128, 256]},
)
_MAX_MODEL_LEN = 1024
# Small enough that the streams before the changes have used every page.
_KV_CACHE_BYTES = 1 << 28
_ABORTED = 7
_HOT = re.compile(r"^rbln_recompiles_after_warmup_total\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Streams for a while; gaps between events of a stream in seconds."""

    gap_p50: float
    gap_p99: float
    longest: float
    answers: int
    failures: int
    aborted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command; `memory` has PSS in bytes before and after the changes."""

    model: str
    streams: int
    quiet: Phase
    changing: Phase
    change_seconds: list[float]
    graphs: list[dict[str, int]]
    failed_changes: int
    hot_path: float
    memory: tuple[int, int]
    compared: int
    different: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks bucket_changes", description=__doc__
    )
    parser.add_argument("--model", default="15m", help="as of models/shapes.py (default: 15m)")
    parser.add_argument("--streams", type=positive, default=32)
    parser.add_argument("--changes", type=positive, default=10)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between changes")
    parser.add_argument("--output-tokens", type=positive, default=64)
    return Command("bucket_changes", parser, _measure, markdown).main(argv)


@dataclass
class _Streams:
    """A closed loop of streams over a fixed list of prompts."""

    port: int
    prompts: list[str]
    tokens: int
    count: int
    texts: dict[int, set[str]] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    failures: int = 0
    aborted: int = 0
    answers: int = 0
    ends: bool = False
    _next: int = 0

    async def run(self, seconds: float | None = None) -> None:
        """Stream until `seconds` are over, or `ends` is set."""
        limits = httpx.Limits(max_connections=self.count)
        url = f"http://127.0.0.1:{self.port}"
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
            until = None if seconds is None else time.monotonic() + seconds
            await asyncio.gather(*(self._loop(client, until) for _ in range(self.count)))

    async def _loop(self, client: httpx.AsyncClient, until: float | None) -> None:
        while not self.ends and (until is None or time.monotonic() < until):
            number = self._next
            self._next += 1
            try:
                await self._stream(client, number)
            except (httpx.HTTPError, KeyError, ValueError):
                self.failures += 1

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        place, closes = number % len(self.prompts), number % _ABORTED == _ABORTED - 1
        body = _body(self.prompts[place], self.tokens) | {"stream": True}
        text, latest, events = "", None, 0
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                if latest is not None:
                    self.gaps.append(now - latest)
                latest, events = now, events + 1
                text += json.loads(line[6:])["choices"][0]["text"]
                if closes and events >= self.tokens // 3:
                    self.aborted += 1
                    return
        self.answers += 1
        self.texts.setdefault(place, set()).add(text)

    def phase(self) -> Phase:
        """Return the figures so far, and begin again."""
        gaps = sorted(self.gaps)
        found = Phase(
            gap_p50=gaps[len(gaps) // 2],
            gap_p99=gaps[len(gaps) * 99 // 100],
            longest=gaps[-1],
            answers=self.answers,
            failures=self.failures,
            aborted=self.aborted,
        )
        self.gaps, self.answers, self.failures, self.aborted = [], 0, 0, 0
        return found


def _body(prompt: str, tokens: int) -> dict[str, Any]:
    limits = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
    return {"prompt": prompt, "temperature": 0, **limits}


def _measure(args: argparse.Namespace, command: str) -> Run:
    begun = begin(command)
    checkpoint = find_checkpoint(args.model)
    path = text_checkpoint(checkpoint.path) if args.model in SHAPES else checkpoint.path
    chooser = random.Random(0)
    lengths = [chooser.randrange(4, 300) for _ in range(3 * args.streams)]
    prompts = [prompt_text(chooser, length) for length in lengths]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rbln-buckets-")))
        serving = Serving.of(path, _MAX_MODEL_LEN, _KV_CACHE_BYTES)
        server = ServerProcess(_side(SETS[-1]), serving, folder / "server.log")
        stack.enter_context(server)
        stack.enter_context(server.awake())
        streams = _Streams(serving.port, prompts, args.output_tokens, args.streams)
        own = asyncio.run(_changes(server, streams, args))
        texts = streams.texts
    compared = different = 0
    for number, sizes in enumerate(SETS):
        say(f"fresh server with {sizes}")
        fresh = _fresh_texts(sizes, path, prompts, args.output_tokens)
        compared += sum(len(found) for found in texts.values()) if not number else 0
        different += sum(text != fresh[place] for place, found in texts.items() for text in found)
    return Run(
        **begun,
        model=checkpoint.name,
        streams=args.streams,
        compared=compared,
        different=different,
        **own,
    )


async def _changes(
    server: ServerProcess, streams: _Streams, args: argparse.Namespace
) -> dict[str, Any]:
    """Stream without and with changes; return the fields of `Run`."""
    url = f"http://127.0.0.1:{server.serving.port}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await streams.run(args.pause)
        streams.phase()
        say("streams alone")
        await streams.run(args.pause * args.changes)
        quiet, before = streams.phase(), server.memory().pss
        load = asyncio.ensure_future(streams.run())
        last = [await _change(client, SETS[n % len(SETS)], args) for n in range(args.changes)]
        streams.ends = True
        await load
        changing = streams.phase()
        # The graphs of the last set but one are freed after the grace.
        await asyncio.sleep(2.0)
        hot = sum(map(float, _HOT.findall((await client.get("/metrics")).text)))
        return {
            "quiet": quiet,
            "changing": changing,
            "change_seconds": [one["seconds"] for one in last],
            "graphs": [one["graphs"] for one in last],
            "failed_changes": sum(one["result"] != "done" for one in last),
            "hot_path": hot,
            "memory": (before, server.memory().pss),
        }


async def _change(
    client: httpx.AsyncClient, sizes: Sizes, args: argparse.Namespace
) -> dict[str, Any]:
    answer = await client.post("/admin/buckets", json=sizes)
    answer.raise_for_status()
    status = answer.json()
    while status["change"] is not None:
        await asyncio.sleep(0.2)
        status = (await client.get("/admin/buckets")).json()
    say(f"{sizes}: {status['last']['result']} in {status['last']['seconds']:.1f} s")
    await asyncio.sleep(args.pause)
    return dict(status["last"])


def _fresh_texts(sizes: Sizes, path: Path, prompts: list[str], tokens: int) -> list[str]:
    """Return the answers of a server that starts with `sizes`, one prompt after another."""
    serving = Serving.of(path, _MAX_MODEL_LEN, _KV_CACHE_BYTES)
    with (
        tempfile.TemporaryDirectory(prefix="rbln-buckets-") as folder,
        ServerProcess(_side(sizes), serving, Path(folder) / "server.log") as server,
        server.awake(),
        httpx.Client(base_url=f"http://127.0.0.1:{serving.port}", timeout=120) as client,
    ):
        answers = [client.post("/v1/completions", json=_body(p, tokens)).json() for p in prompts]
    return [answer["choices"][0]["text"] for answer in answers]


def _side(sizes: Sizes) -> ServerSide:
    ours = server_side("ours")
    rbln = {
        "decode_batch_bucket_strategy": "manual",
        "decode_batch_bucket_manual_buckets": sizes["decode"],
        "prefill_chunk_buckets": sizes["prefill"],
    }
    config = json.dumps({"rbln": rbln})
    grace = ("--bucket-grace-s", "1", "--host", "127.0.0.1")
    return ours.with_flags("--max-num-seqs", "32", "--additional-config", config, *grace)


def markdown(run: Run) -> str:
    """Return the report."""
    new: dict[str, int] = {}
    for graphs in run.graphs:
        for how, count in graphs.items():
            new[how] = new.get(how, 0) + count
    made = ", ".join(f"{count} {how}" for how, count in sorted(new.items())) or "none"
    before, after = (size / 2**20 for size in run.memory)
    seconds = sorted(run.change_seconds)
    lines = [
        *heading(f"Changes of buckets under load: {run.model}", run),
        "",
        f"{run.streams} streams, every {_ABORTED}th closed early; {len(seconds)} changes among "
        f"{len(SETS)} sets, each {seconds[0]:.1f} to {seconds[-1]:.1f} s. New graphs: {made}.",
        "",
        "| | quiet | with changes | ratio |",
        "|---|---|---|---|",
        *(
            f"| {about} | {a * 1e3:.2f} ms | {b * 1e3:.2f} ms | {b / a:.2f} |"
            for about, a, b in (
                ("gaps' p50", run.quiet.gap_p50, run.changing.gap_p50),
                ("gaps' p99", run.quiet.gap_p99, run.changing.gap_p99),
                ("longest gap", run.quiet.longest, run.changing.longest),
            )
        ),
        f"| answers | {run.quiet.answers} | {run.changing.answers} | |",
        f"| closed early | {run.quiet.aborted} | {run.changing.aborted} | |",
        f"| failed requests | {run.quiet.failures} | {run.changing.failures} | |",
        "",
        f"Failed changes: {run.failed_changes}. Compiles on the hot path: {run.hot_path:.0f}. "
        f"Memory (PSS): {before:.0f} MiB before, {after:.0f} MiB after.",
        "",
        f"Answers: {run.compared} different texts of the load, each compared with those of a fresh "
        f"server of each of the {len(SETS)} sets: {run.different} differ.",
    ]
    return "\n".join(lines) + "\n"
