"""Quantised decode: ours in bfloat16 and other forms, vLLM's CPU backend, llama.cpp, in one run.

``python -m benchmarks quantized --save``. Rounds, cells and limits are those of the steps that
``compare`` measures; see benchmarks/README.md. Invariant: one run gives all figures of a report. A
ratio is taken between two sides of one round, and only then the median over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.compare.plans import DECODE_BATCHES, plan_for
from benchmarks.compare.steps import Subject, log_model, measure_steps
from benchmarks.engines.engine_process import OURS
from benchmarks.engines.peers import gguf_of, peers_python
from benchmarks.engines.sides import StepModel, StepSide, step_side
from benchmarks.models.quantized_model import (
    FORMS,
    GGUF_TYPES,
    quantized_checkpoint,
    quantized_gguf,
    step_bytes,
)
from benchmarks.models.shapes import CACHE_ROOT, find_checkpoint
from benchmarks.models.text_checkpoint import text_checkpoint
from benchmarks.runner.command import SHARE, Figure, disturbance, machine_lines, positive, spread
from benchmarks.runner.logged_run import get_header, measure_logged, save_logged
from benchmarks.runner.machine import Machine, ModelWork
from benchmarks.runner.records import (
    EngineRecord,
    Header,
    LimitsRecord,
    Log,
    ModelRecord,
    StepRecord,
)

BASE = "ours bf16"


def our_name(width: str) -> str:
    """Return the name of ours in a form of quantized_forms.FORMS."""
    return f"ours {width}"


def llama_name(kind: str) -> str:
    """Return the name of llama.cpp with a type of quantized_model.GGUF_TYPES."""
    return f"llama.cpp {kind}"


def markdown(log: Log) -> str:
    """Return the report of what `log` holds; raises IndexError without a header or a model."""
    header, model = log.of(Header)[0], log.of(ModelRecord)[0]
    steps = log.of(StepRecord)
    names = [name for name in header.sides if any(s.side == name for s in steps)]
    bandwidths = [record.bytes_per_s / 1e9 for record in log.of(LimitsRecord)]
    return "\n".join(
        [
            f"# Quantised decode, {header.started[:10]}, {header.machine['cpu']}",
            "",
            f"`{header.command}` at {header.started}, commit {header.machine['commit']}.",
            "",
            *machine_lines(Machine(**header.machine), header.load_before),
            *(f"- {name}: {note}" for name, note in header.sides.items()),
            "- Read bandwidth on a buffer of the bfloat16 weights, by round: "
            + ", ".join(f"{value:.1f}" for value in bandwidths)
            + " GB/s.",
            "",
            f"{model.model}: {model.parameters / 1e6:.0f}M parameters. A step's time is the median "
            "of a cell's steps, then over rounds. *Of limit* is the weights' bytes over the "
            "round's read bandwidth, over the step. Ratios are taken within a round, with the "
            "lowest and the highest in brackets.",
            "",
            disturbance([record.other_busy_cores for record in steps]) if steps else "",
            "",
            *_table(log, model, names),
            "",
        ]
    )


def figures(log: Log) -> list[Figure]:
    """Return the figures of each side, with the bytes that its steps read and its memory."""
    model, found = log.of(ModelRecord)[0], []
    for side in (name for name in log.of(Header)[0].sides if name in model.work):
        figure = partial(Figure, model=model.model, side=side)
        found.append(figure(name="read per step", unit="MB", values=[model.work[side] / 1e6]))
        engines = log.of(EngineRecord, side=side)
        memory = [r.about["private"] / 1e6 for r in engines if r.about.get("private")]
        found.append(figure(name="memory", unit="MB", values=[*memory]))
        for batch in DECODE_BATCHES:
            cells = _cells(log.of(StepRecord), side, batch)
            name, steps = (
                f"decode step, batch {batch}",
                [1e3 * r.step if r.step else None for r in cells],
            )
            found.append(figure(name=name, unit="ms", values=steps))
            shares = [_of_limit(log, model, record) for record in cells]
            found.append(figure(name=f"{name}, of the limit", unit=SHARE, values=shares))
        prefills = [r.prefill for r in log.of(StepRecord, side=side) if not r.decodes]
        found.append(figure(name="prefill of 128 tokens", unit="s", values=prefills))
    return [figure for figure in found if figure.values]


def _table(log: Log, model: ModelRecord, names: list[str]) -> list[str]:
    heads = "".join(f"| batch {b} ms | of limit | vs bf16 " for b in DECODE_BATCHES)
    lines = [
        f"| side | read per step MB | memory MB {heads}| prefill 128 tokens/s |",
        "|---" * (4 + 3 * len(DECODE_BATCHES)) + "|",
    ]
    for name in names:
        cells = [f"{model.work[name] / 1e6:.0f}", _memory(log, name)]
        for batch in DECODE_BATCHES:
            ours = _cells(log.of(StepRecord), name, batch)
            cells += [
                _middle([record.step for record in ours], 1e3),
                _middle([_of_limit(log, model, record) for record in ours], 1.0),
                _ratio(log.of(StepRecord), BASE, name, batch),
            ]
        prefills = [r for r in log.of(StepRecord, side=name) if r.output_tokens == 1]
        rates = [r.prompt_tokens / r.prefill if r.prefill else None for r in prefills]
        cells.append(_middle(rates, 1.0, ".0f"))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _memory(log: Log, name: str) -> str:
    found = [record.about.get("private") for record in log.of(EngineRecord, side=name)]
    return f"{found[0] / 1e6:.0f}" if found and found[0] else "-"


def _of_limit(log: Log, model: ModelRecord, record: StepRecord) -> float | None:
    limits = log.limits(model.model, record.round, "steps")
    if limits is None or not record.step:
        return None
    return model.work[record.side] / limits.bytes_per_s / record.step


def _cells(steps: list[StepRecord], side: str, batch: int) -> list[StepRecord]:
    return [r for r in steps if (r.side, r.batch) == (side, batch) and r.output_tokens > 1]


def _ratios(steps: list[StepRecord], slow: str, fast: str, batch: int) -> list[float]:
    """Return, by round, the step time of `slow` over that of `fast`."""
    slow_steps = {record.round: record.step for record in _cells(steps, slow, batch)}
    return [
        slow_steps[record.round] / record.step  # type: ignore[operator]
        for record in _cells(steps, fast, batch)
        if record.step and slow_steps.get(record.round)
    ]


def _ratio(steps: list[StepRecord], slow: str, fast: str, batch: int) -> str:
    return spread(_ratios(steps, slow, fast, batch))


def _middle(values: list[float | None], factor: float, spec: str = "") -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.median(known) * factor:{spec or ('.1f' if factor > 1 else '.2f')}}"


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
    log.add(get_header(command, {side.side.name: side.side.note for side in sides}))
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
