"""One GGUF file on ours, on vLLM's CPU backend and on llama.cpp: starts, first token, decode.

``python -m benchmarks same_file --save``. llama.cpp reads the file, ours the checkpoint made of it,
and vLLM, which reads no such files, the same in bfloat16. Rounds, cells and starts are those of
``compare``; see benchmarks/README.md. Invariant: one run gives all figures of a report.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.compare.figures import figures
from benchmarks.compare.http import HttpComparison
from benchmarks.compare.plans import plan_for
from benchmarks.compare.steps import Subject, log_model, measure_steps
from benchmarks.engines.peers import peers_python
from benchmarks.engines.server_process import ServerSide
from benchmarks.engines.sides import StepSide, server_side, step_side
from benchmarks.models.gguf_checkpoint import expanded, gguf_file
from benchmarks.models.quantized_model import step_bytes
from benchmarks.models.shapes import CACHE_ROOT, find_checkpoint
from benchmarks.runner.command import disturbance, machine_lines, positive, say
from benchmarks.runner.figures import table
from benchmarks.runner.limits import ModelWork
from benchmarks.runner.logged_run import header_of, measure_logged, save_logged
from benchmarks.runner.machine import Machine
from benchmarks.runner.records import Failure, Header, Log, ModelRecord, StepRecord
from rbln_backend.checkpoints.catalogue import CATALOGUE
from rbln_backend.checkpoints.folders import checkpoint_of

_SIDES = ("ours", "vllm-cpu-all-cores", "llama.cpp")
_PREFILL_TOKENS = (32, 128, 512)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(words)
    measure_logged(
        "same_file",
        words,
        lambda log, command: _measure(log, args, command),
        lambda log: _report(log, save=args.save),
        suffix="-same-file",
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks same_file", description=__doc__)
    parser.add_argument(
        "model",
        nargs="?",
        default="smollm2",
        help=f"a GGUF file, or {', '.join(CATALOGUE)}, which is downloaded once (the default)",
    )
    parser.add_argument("--rounds", type=positive, default=2, help="default: 2")
    parser.add_argument("--starts", type=positive, default=1, help="warm ones (default: 1)")
    parser.add_argument(
        "--save", action="store_true", help="write report and numbers to benchmarks/results/"
    )
    return parser


def _steps_of(side: StepSide, folder: Path) -> StepSide:
    return replace(side, arguments=lambda model: side.arguments(replace(model, text_model=folder)))


def _serving(side: ServerSide, folder: Path) -> ServerSide:
    """Return `side` over `folder`, with the served name of all sides."""
    return replace(
        side,
        note=f"{side.note}; {step_bytes(folder) / 1e6:.0f} MB of weights",
        command=lambda serving: [
            *side.command(replace(serving, text_model=folder)),
            *("--served-model-name", str(serving.text_model)),
        ],
    )


def _measure(log: Log, args: argparse.Namespace, command: str) -> None:
    peers_python()
    gguf = gguf_file(args.model)
    packed = checkpoint_of(str(gguf), CACHE_ROOT)
    checkpoint = find_checkpoint(str(expanded(packed)))
    stepped = {name: step_side(name) for name in _SIDES}
    served = {name: server_side(name) for name in _SIDES}
    stepped["ours"] = _steps_of(stepped["ours"], packed)
    served["ours"] = _serving(served["ours"], packed)
    log.add(header_of(command, {name: side.note for name, side in served.items()}))
    plan = plan_for(checkpoint.parameters)
    subject = Subject(
        checkpoint=checkpoint,
        text_model=checkpoint.path,
        gguf=gguf,
        work=ModelWork.of(checkpoint.path),
        plan=replace(plan, rounds=args.rounds, prefill_tokens=_PREFILL_TOKENS),
    )
    log_model(log, subject, gguf)
    with tempfile.TemporaryDirectory(prefix="run-", dir=CACHE_ROOT) as folder:
        say("steps in process")
        measure_steps(log, subject, list(stepped.values()), Path(folder))
        servers = HttpComparison(log, subject, list(served.values()), Path(folder), own_caches=True)
        say("cold starts")
        servers.cold_starts()
        say("warm starts")
        servers.warm_starts(args.starts)


def _report(log: Log, *, save: bool) -> None:
    header, models = log.of(Header)[0], log.of(ModelRecord)
    report = _markdown(log, header, models[0]) if models else ""
    print(report)
    if save and report:
        save_logged(log, "same-file", report)


def _markdown(log: Log, header: Header, model: ModelRecord) -> str:
    peers = ", ".join(f"{name} {version}" for name, version in header.peer_versions.items())
    lines = [
        f"# {Path(model.path).name} on three engines, {header.started[:10]}",
        "",
        f"`{header.command}` at {header.started}, commit {header.machine['commit']}.",
        "",
        *machine_lines(Machine(**header.machine), header.load_before),
        f"- Peers' environment: {peers}.",
        *(f"- `{name}`: {note}." for name, note in header.sides.items()),
        "",
        f"{model.parameters / 1e6:.0f}M parameters. llama.cpp reads the file's own "
        f"{Path(model.path).stat().st_size / 1e6:.0f} MB of blocks, vLLM "
        f"{model.parameters * 2 / 1e6:.0f} MB of bfloat16. *Of limit* is the bfloat16 bytes over "
        "the read bandwidth of the round, over the step, for all three: who reads less may be "
        "beyond it.",
        "",
    ]
    lines += [*table(figures(log), model.model), ""]
    if others := [record.other_busy_cores for record in log.all_of(StepRecord)]:
        lines += [disturbance(others, excluded=True), ""]
    for failure in log.of(Failure):
        first = failure.text.splitlines()[0]
        lines += [f"**Failed**: {failure.side} ({failure.part}): {first}", ""]
    return "\n".join(lines)
