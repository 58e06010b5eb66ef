"""Time to first token of one API key while another one floods the server.

``python -m benchmarks tenants --save``: one server, whose clients send streamed completions. A
quiet key sends one request after the other: alone, beside a flood of its own key (one queue, as
without keys), and beside a flood of another key. Invariant: every figure of a report comes from one
run of this command, and the situations alternate within it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.engines.server_process import ServerProcess, Serving
from benchmarks.engines.sides import server_side
from benchmarks.models.shapes import SHAPES, find_checkpoint
from benchmarks.models.text_checkpoint import prompt_text, text_checkpoint
from benchmarks.runner.command import Command, RunHeader, begin, heading, positive, say

_MAX_MODEL_LEN = 2048
_KV_CACHE_BYTES = 1 << 30
_RETRY_S = 0.2
_SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Situation:
    """Keys of the quiet client and of the flood, None without a flood; keys are their names."""

    name: str
    quiet: str
    flood: str | None


_SITUATIONS = (
    Situation("alone", "quiet", None),
    Situation("flood of the same key", "quiet", "quiet"),
    Situation("flood of another key", "quiet", "flood"),
    Situation("the same, with `in-flight`", "quiet", "bounded"),
    Situation("the same, and a weight of 4", "heavy", "bounded"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command; `first_s` has seconds to the first token by situation."""

    model: str
    rows: int
    clients: int
    in_flight: int
    prompt_tokens: int
    output_tokens: int
    first_s: dict[str, list[float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tenants", description=__doc__)
    parser.add_argument("--model", default="15m", help="as of models/shapes.py (default: 15m)")
    parser.add_argument("--rounds", type=positive, default=4, help="of all situations (4)")
    parser.add_argument("--requests", type=positive, default=25, help="of a situation (25)")
    parser.add_argument("--rows", type=positive, default=8, help="--max-num-seqs (8)")
    parser.add_argument("--clients", type=positive, default=24, help="of the flood (24)")
    parser.add_argument("--prompt-tokens", type=positive, default=1000, help="of all (1000)")
    parser.add_argument("--output-tokens", type=positive, default=64, help="of the flood (64)")
    names = [situation.name for situation in _SITUATIONS[1:]]
    parser.add_argument("--situations", nargs="+", choices=names, default=names, help="and alone")
    return Command("tenants", parser, _measure, markdown).main(argv)


def _measure(args: argparse.Namespace, command: str) -> Run:
    begun = begin(command)
    checkpoint = find_checkpoint(args.model)
    path = text_checkpoint(checkpoint.path) if args.model in SHAPES else checkpoint.path
    in_flight = max(1, args.rows - 2)
    keys = f"quiet=quiet,flood=flood,bounded[in-flight:{in_flight}]=bounded,heavy[weight:4]=heavy"
    situations = [one for one in _SITUATIONS if one.name in ("alone", *args.situations)]
    first_s: dict[str, list[float]] = {situation.name: [] for situation in situations}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rbln-tenants-")))
        side = server_side("ours").with_flags("--max-num-seqs", str(args.rows), "--api-key", keys)
        serving = Serving.of(path, _MAX_MODEL_LEN, _KV_CACHE_BYTES)
        log = folder / "server.log"
        server = stack.enter_context(ServerProcess(replace(side, api_key="quiet"), serving, log))
        stack.enter_context(server.awake())
        bench = _Bench(server, args)
        for number in range(args.rounds):
            for situation in situations:
                first_s[situation.name] += bench.times(situation)
            say(f"round {number + 1} of {args.rounds}")
    return Run(
        **begun,
        model=checkpoint.name,
        rows=args.rows,
        clients=args.clients,
        in_flight=in_flight,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        first_s=first_s,
    )


class _Bench:
    """One server, and prompts without repetition."""

    def __init__(self, server: ServerProcess, args: argparse.Namespace) -> None:
        self._server = server
        self._args = args
        self._chooser = random.Random(0)
        self._lock = threading.Lock()

    def times(self, situation: Situation) -> list[float]:
        """Return the seconds to the first token of the quiet client's requests."""
        with self._flood(situation.flood):
            times = [self._send(situation.quiet, 4) for _ in range(self._args.requests)]
        # Aborted answers of the flood leave the engine.
        time.sleep(_SETTLE_S)
        return [seconds for seconds in times if seconds is not None]

    @contextmanager
    def _flood(self, key: str | None) -> Iterator[None]:
        stop = threading.Event()

        def send(name: str) -> None:
            while not stop.is_set():
                if self._send(name, self._args.output_tokens, stop) is None:
                    time.sleep(_RETRY_S)

        number = 0 if key is None else self._args.clients
        threads = [threading.Thread(target=send, args=(key,)) for _ in range(number)]
        for thread in threads:
            thread.start()
        if threads:
            time.sleep(_SETTLE_S)
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _send(
        self, key: str, output_tokens: int, stop: threading.Event | None = None
    ) -> float | None:
        """Return the seconds to the first token of one stream, None for a 429."""
        with self._lock:
            prompt = prompt_text(self._chooser, self._args.prompt_tokens)
        body = json.dumps({**self._server.body(prompt, output_tokens), "ignore_eos": True})
        connection = http.client.HTTPConnection("127.0.0.1", self._server.serving.port, timeout=300)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        first: float | None = None
        began = time.perf_counter()
        try:
            connection.request("POST", "/v1/completions", body, headers)
            answer = connection.getresponse()
            if answer.status == http.HTTPStatus.TOO_MANY_REQUESTS:
                answer.read()
                return None
            if answer.status != http.HTTPStatus.OK:
                raise self._server.error(f"answered {answer.status}")
            while (line := answer.readline()) and not (stop is not None and stop.is_set()):
                if line.startswith(b"data:") and first is None:
                    first = time.perf_counter() - began
        finally:
            connection.close()
        return first


def markdown(run: Run) -> str:
    """Return the report."""
    lines = [
        *heading("One key beside the flood of another", run),
        f"- Model {run.model}, in bfloat16, {run.rows} rows. The flood are {run.clients} clients "
        f"with answers of {run.output_tokens} tokens; `in-flight` lets {run.in_flight} of its "
        f"requests run. All prompts have {run.prompt_tokens} tokens and no common prefix.",
        "- Seconds from a request of the quiet client to its first token; the ratio is to alone.",
        "",
        "| situation | requests | p50 | p99 | p50, ratio | p99, ratio |",
        "|---|---|---|---|---|---|",
    ]
    alone = [_percentile(run.first_s["alone"], share) for share in (50, 99)]
    for name, times in run.first_s.items():
        p50, p99 = (_percentile(times, share) for share in (50, 99))
        lines.append(
            f"| {name} | {len(times)} | {p50:.3f} | {p99:.3f} | {p50 / alone[0]:.2f} | "
            f"{p99 / alone[1]:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _percentile(times: Sequence[float], share: int) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[share - 1]
