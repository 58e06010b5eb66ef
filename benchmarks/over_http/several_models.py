"""Random requests to three models in memory for two: wrong answers, leaks, swaps and waits.

``python -m benchmarks several_models --minutes 10 --save``. Each model's greedy answers to a few
prompts are taken first; every later answer must be equal to them. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.engines.engine_process import clean_environment
from benchmarks.engines.processes import descendants
from benchmarks.engines.server_process import free_port
from benchmarks.models.shapes import find_checkpoint
from benchmarks.models.text_checkpoint import prompt_text, text_checkpoint
from benchmarks.runner.command import Command, RunHeader, begin, heading, positive, say, spread

_MODELS = ("15m", "15m-window", "160m")
_MEMORY_GIB = 1.2
_FLAGS = "--max-model-len 512 --max-num-seqs 4 --kv-cache-memory-bytes 134217728"
_PROMPTS = 4
_TOKENS = 24
_MEAN_PAUSE_S = 0.5
_STREAMED = 0.5
_MEMORY_PERIOD_S = 5.0
_READY_S = 300.0
_END_S = 60
_COMPILED = re.compile(r'rbln_compile_cache_requests_total\{[^}]*result="miss"[^}]*\} (\S+)')


@dataclass(kw_only=True)
class Counts:
    """Answers by status, answers that were not the model's, seconds of waits and of loads."""

    # No Counter: `asdict` does not copy one.
    statuses: dict[int, int] = field(default_factory=dict)
    wrong: int = 0
    progress_comments: int = 0
    warm_s: list[float] = field(default_factory=list)
    """Seconds of answers to models that were loaded."""
    waited_s: list[float] = field(default_factory=list)
    """Seconds of answers to models that had to be loaded, or left meanwhile."""

    def add(self, status: int) -> None:
        """Count an answer of `status`."""
        self.statuses[status] = self.statuses.get(status, 0) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run; memory is the proportional set size of all processes, in MiB, over time."""

    minutes: float
    clients: int
    models: tuple[str, ...]
    counts: Counts
    loads: dict[str, int]
    load_s: list[float]
    compiled_before: float
    compiled: float
    memory_mib: list[int]
    front_mib: list[int]
    files: list[int]
    processes_left: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks several_models", description=__doc__
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="default: 10")
    parser.add_argument("--clients", type=positive, default=4, help="default: 4")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default: 0)")
    return Command("several_models", parser, _measure, markdown).main(argv)


def _measure(args: argparse.Namespace, command: str) -> Run:
    begun = begin(command)
    with tempfile.TemporaryDirectory(prefix="rbln-models-") as folder:
        with _server(Path(folder)) as (process, url):
            soak = _Soak(url, process.pid, args)
            asyncio.run(soak.run())
            tree = descendants(process.pid)
        left = sum(_runs(pid) for pid in tree)
    return Run(**begun, **soak.result(), processes_left=left)


@contextmanager
def _server(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a server of all models and yield its process and its URL."""
    entries = [
        {
            "name": name,
            "path": str(text_checkpoint(find_checkpoint(name).path)),
            "flags": _FLAGS,
            "memory_gib": _MEMORY_GIB,
        }
        for name in _MODELS
    ]
    content = {"memory_gib": 2 * _MEMORY_GIB + 0.1, "min_resident_s": 2, "models": entries}
    (folder / "models.json").write_text(json.dumps(content), encoding="utf-8")
    port = free_port()
    command = [sys.executable, "-m", "server", "serve", "--models", str(folder / "models.json")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--stream-commit-s", "1"]
    say("starting the server")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=Path(__file__).parents[2],
            env=clean_environment({}),
        )
    try:
        yield process, f"http://127.0.0.1:{port}"
        process.terminate()
        process.wait(_END_S)
    except BaseException:
        sys.stderr.write("\n".join((folder / "log").read_text().splitlines()[-30:]) + "\n")
        raise
    finally:
        process.kill()
        process.wait()


class _Soak:
    """The clients and the measurements beside them."""

    def __init__(self, url: str, pid: int, args: argparse.Namespace) -> None:
        self._url = url
        self._pid = pid
        self._args = args
        chooser = random.Random(args.seed)
        self._prompts = [prompt_text(chooser, 16) for _ in range(_PROMPTS)]
        self._expected: dict[tuple[str, int], str] = {}
        self._counts = Counts()
        self._memory: list[int] = []
        self._front: list[int] = []
        self._files: list[int] = []
        self._load_s: list[float] = []
        self._loads: dict[str, int] = {}
        self._compiled = [0.0, 0.0]

    async def run(self) -> None:
        """Take the expected answers, then send requests until the time is over."""
        async with httpx.AsyncClient(base_url=self._url, timeout=300) as client:
            await _until_ready(client)
            for name in _MODELS:
                # Kernels are built and graphs captured where the store has none.
                (await client.post(f"/wake_up?model={name}", timeout=700)).raise_for_status()
                for number in range(_PROMPTS):
                    answer = await client.post("/v1/completions", json=self._body(name, number))
                    answer.raise_for_status()
                    self._expected[name, number] = answer.json()["choices"][0]["text"]
            say("all models have answered; sending random requests")
            self._compiled[0] = await _compiled(client)
            end = time.monotonic() + self._args.minutes * 60
            measuring = asyncio.create_task(self._follow(client))
            async with asyncio.TaskGroup() as clients:
                for number in range(self._args.clients):
                    clients.create_task(self._client(client, number, end))
            measuring.cancel()
            with suppress(asyncio.CancelledError):
                await measuring
            self._compiled[1] = await _compiled(client)
            models = (await client.get("/readyz")).json()["models"]
            self._loads = {name: model["loads"] for name, model in models.items()}

    def result(self) -> dict[str, Any]:
        """Return the fields of the run."""
        return {
            "minutes": self._args.minutes,
            "clients": self._args.clients,
            "models": _MODELS,
            "counts": self._counts,
            "loads": self._loads,
            "load_s": self._load_s,
            "compiled_before": self._compiled[0],
            "compiled": self._compiled[1] - self._compiled[0],
            "memory_mib": self._memory,
            "front_mib": self._front,
            "files": self._files,
        }

    def _body(self, name: str, number: int) -> dict[str, Any]:
        body = {"model": name, "prompt": self._prompts[number], "max_tokens": _TOKENS}
        return {**body, "temperature": 0, "ignore_eos": True}

    async def _client(self, client: httpx.AsyncClient, number: int, end: float) -> None:
        chooser = random.Random(f"{self._args.seed} {number}")
        while time.monotonic() < end:
            name, prompt = chooser.choice(_MODELS), chooser.randrange(_PROMPTS)
            states = (await client.get("/readyz")).json()["models"]
            warm = states[name]["state"] == "ready"
            began = time.monotonic()
            if chooser.random() < _STREAMED:
                text = await self._stream(client, name, prompt)
            else:
                text = await self._whole(client, name, prompt)
            if text is not None:
                self._counts.wrong += text != self._expected[name, prompt]
                took = self._counts.warm_s if warm else self._counts.waited_s
                took.append(time.monotonic() - began)
            await asyncio.sleep(chooser.expovariate(1 / _MEAN_PAUSE_S))

    async def _whole(self, client: httpx.AsyncClient, name: str, prompt: int) -> str | None:
        answer = await client.post("/v1/completions", json=self._body(name, prompt))
        self._counts.add(answer.status_code)
        if answer.status_code != 200:
            await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
            return None
        body = answer.json()
        self._counts.wrong += body["model"] != name
        return str(body["choices"][0]["text"])

    async def _stream(self, client: httpx.AsyncClient, name: str, prompt: int) -> str | None:
        body = {**self._body(name, prompt), "stream": True}
        text, ended = "", False
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            self._counts.add(answer.status_code)
            async for line in answer.aiter_lines():
                self._counts.progress_comments += line.startswith(": loading")
                ended |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    text += "".join(c["text"] for c in event.get("choices", ()))
        return text if ended and answer.status_code == 200 else None

    async def _follow(self, client: httpx.AsyncClient) -> None:
        """Measure memory and open files, and collect the seconds of loads."""
        seen: dict[str, int] = {}
        while True:
            models = (await client.get("/readyz")).json()["models"]
            for name, model in models.items():
                if model["loads"] > seen.get(name, model["loads"]) and model["load_s"]:
                    self._load_s.append(model["load_s"])
                seen[name] = model["loads"]
            pids = [self._pid, *descendants(self._pid)]
            self._memory.append(sum(map(_pss_mib, pids)))
            self._front.append(_pss_mib(self._pid))
            self._files.append(_num_files(self._pid))
            await asyncio.sleep(_MEMORY_PERIOD_S)


async def _until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(_READY_S):
        while True:
            with suppress(httpx.HTTPError):
                if (await client.get("/readyz")).status_code == 200:
                    return
            await asyncio.sleep(0.2)


async def _compiled(client: httpx.AsyncClient) -> float:
    """Return how many graphs were not in the store, of all models."""
    page = (await client.get("/metrics")).text
    return sum(map(float, _COMPILED.findall(page)))


def _pss_mib(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) // 1024
    return 0


def _num_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _runs(pid: int) -> bool:
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        return stat.rpartition(")")[2].split()[0] != "Z"
    return False


def markdown(run: Run) -> str:
    """Return the report."""
    counts = run.counts
    statuses = ", ".join(f"{n} x {status}" for status, n in sorted(counts.statuses.items()))
    third = max(1, len(run.memory_mib) // 3)
    lines = [
        *heading("Three models in memory for two", run),
        f"- Models {', '.join(run.models)}; {run.clients} clients for {run.minutes:g} minutes.",
        f"- Answers by status: {statuses}. Wrong: **{counts.wrong}**.",
        f"- Loads: {sum(run.loads.values())}; graphs that were not in the store: "
        f"**{run.compiled:g}** ({run.compiled_before:g} before).",
        f"- Streams that waited got {counts.progress_comments} comments of progress.",
        f"- Processes left after the end: {run.processes_left}.",
        "",
        "| figure | median [lowest, highest] |",
        "|---|---|",
        f"| seconds of a load with stored graphs | {spread(run.load_s)} |",
        f"| seconds of an answer, model loaded | {spread(counts.warm_s, 3)} |",
        f"| seconds of an answer, model not loaded | {spread(counts.waited_s)} |",
        f"| p95 of these | {_p95(counts.waited_s):.2f} |",
        f"| MiB of all processes, first third | {spread(run.memory_mib[:third], 0)} |",
        f"| MiB of all processes, last third | {spread(run.memory_mib[-third:], 0)} |",
        f"| MiB of the front process, first third | {spread(run.front_mib[:third], 0)} |",
        f"| MiB of the front process, last third | {spread(run.front_mib[-third:], 0)} |",
        f"| open files of the front process, last third | {spread(run.files[-third:], 0)} |",
    ]
    return "\n".join(lines) + "\n"


def _p95(values: Sequence[float]) -> float:
    if len(values) < 2:
        return max(values, default=0.0)
    return statistics.quantiles(values, n=20)[-1]
