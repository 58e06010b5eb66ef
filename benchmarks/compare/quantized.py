"""Quantised decode: ours in bfloat16 and other forms, vLLM's CPU backend, llama.cpp, in one run.

``python -m benchmarks quantized --save``. Rounds, cells and limits are those of the steps that
``compare`` measures; see benchmarks/README.md. Invariant: one run gives all figures of a
report.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.compare.plans import plan_for
from benchmarks.compare.quantized_report import BASE, figures, llama_name, markdown, our_name
from benchmarks.compare.steps import Subject, log_model, measure_steps
from benchmarks.engines.engine_process import OURS
from benchmarks.engines.peers import gguf_of, peers_python
from benchmarks.engines.sides import StepModel, StepSide, step_side
from benchmarks.models.quantized_forms import FORMS
from benchmarks.models.quantized_model import (
    GGUF_TYPES,
    quantized_checkpoint,
    quantized_gguf,
    step_bytes,
)
from benchmarks.models.shapes import CACHE_ROOT, find_checkpoint
from benchmarks.models.text_checkpoint import text_checkpoint
from benchmarks.runner.command import positive
from benchmarks.runner.limits import ModelWork
from benchmarks.runner.logged_run import header_of, measure_logged, save_logged
from benchmarks.runner.records import Log, ModelRecord

PREFILL_TOKENS = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(words)
    if args.report is not None:
        _report(Log.read(args.report), save=args.save)
        return 0
    measure_logged(
        "quantized",
        words,
        lambda log, command: _measure(log, args, command),
        lambda log: _report(log, save=args.save),
        suffix="-quantized",
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks quantized", description=__doc__)
    parser.add_argument("--model", default="1.2b", help="of models/shapes.py (default: 1.2b)")
    parser.add_argument(
        "--width", nargs="+", choices=FORMS, default=["w8-channel", "w4-group128"], help="of ours"
    )
    parser.add_argument(
        "--vllm", nargs="+", choices=FORMS, default=[], help="forms for vLLM's CPU backend, too"
    )
    parser.add_argument(
        "--alone", action="store_true", help="without llama.cpp, which some models have no form for"
    )
    parser.add_argument("--rounds", type=positive, default=4, help="default: 4")
    parser.add_argument("--steps", type=positive, default=32, help="tokens a cell (default: 32)")
    parser.add_argument(
        "--save", action="store_true", help="write report and figures to benchmarks/results/"
    )
    parser.add_argument(
        "--report", type=Path, metavar="JSONL", help="measure nothing; report an earlier run"
    )
    return parser


def _measure(log: Log, args: argparse.Namespace, command: str) -> None:
    checkpoint = find_checkpoint(args.model)
    text_model = text_checkpoint(checkpoint.path)
    paths = {BASE: text_model}
    paths |= {our_name(width): quantized_checkpoint(text_model, width) for width in args.width}
    peer = "vllm-cpu-all-cores"
    theirs = {f"{peer} {width}": quantized_checkpoint(text_model, width) for width in args.vllm}
    # Ours needs no GGUF.
    gguf = text_model
    sides = [_side(OURS.name, name, path) for name, path in paths.items()]
    sides += [_side(peer, name, path) for name, path in theirs.items()]
    if not args.alone:
        python, gguf = peers_python(), gguf_of(text_model)
        files = {llama_name(kind): quantized_gguf(gguf, kind, python) for kind in GGUF_TYPES}
        sides += [_side("llama.cpp", name, path) for name, path in files.items()]
        theirs |= files
    paths |= theirs
    log.add(header_of(command, {side.side.name: side.side.note for side in sides}))
    subject = Subject(
        checkpoint=checkpoint,
        text_model=text_model,
        gguf=gguf,
        work=ModelWork.of(text_model),
        plan=replace(
            plan_for(checkpoint.parameters),
            rounds=args.rounds,
            step_tokens=args.steps,
            prefill_tokens=(PREFILL_TOKENS,),
        ),
    )
    log_model(log, subject, text_model, **{name: step_bytes(p) for name, p in paths.items()})
    with tempfile.TemporaryDirectory(prefix="run-", dir=CACHE_ROOT) as folder:
        measure_steps(log, subject, sides, Path(folder))


def _side(runner: str, name: str, path: Path) -> StepSide:
    """Return the side `runner` of ``step_side`` as `name`, with its own file or folder."""
    plain = step_side(runner)
    field = "gguf" if path.is_file() else "model"

    def arguments(model: StepModel) -> dict[str, Any]:
        given = plain.arguments(model) | {field: str(path)}
        # Graphs for chunks longer than the measured prefill are not needed.
        return given if path.is_file() else given | {"max_num_batched_tokens": PREFILL_TOKENS}

    side = replace(plain.side, name=name, note=f"{plain.side.note}; {path.name}")
    return StepSide(side=side, arguments=arguments)


def _report(log: Log, *, save: bool) -> None:
    report = markdown(log)
    print(report)
    if save:
        save_logged(log, f"quantized-{log.of(ModelRecord)[0].model}", report, figures(log))
