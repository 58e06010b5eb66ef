"""Shared parts of the measuring commands: arguments, progress on standard error, figures."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.engines.engine_process import EngineProcessError
from benchmarks.runner.machine import Machine, describe_machine

RESULTS = Path(__file__).parents[1] / "results"
# Threads of an engine wait for each other many times per step, so little other load costs much.
DISTURBED_CORES = 0.1
MAX_SAMPLES = 3


class Sample(Protocol):
    """Sample during which processes other than the measured ones kept so many cores busy."""

    @property
    def other_busy_cores(self) -> float: ...


class MeasuredRun(Protocol):
    """Header fields of a command's run."""

    @property
    def started(self) -> str: ...

    @property
    def machine(self) -> Machine: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """Header of a run's record; `load_before` is the load average."""

    started: str
    command: str
    machine: Machine
    load_before: float


def begin(command: str) -> dict[str, Any]:
    """Return the fields of a `RunHeader` for a run that begins now."""
    return {
        "started": datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
        "command": command,
        "machine": describe_machine(),
        "load_before": os.getloadavg()[0],
    }


RunT = TypeVar("RunT", bound=MeasuredRun)
T = TypeVar("T")
SampleT = TypeVar("SampleT", bound=Sample)


def raw_numbers(run: Any) -> str:
    """Return all measurements of a run as JSON."""
    return compact_json(asdict(run))


def compact_json(fields: Mapping[str, Any]) -> str:
    """Return a JSON object with one line for each field, and for each object in its lists."""
    return _object_lines(fields, "") + "\n"


def _object_lines(fields: Mapping[str, Any], indent: str) -> str:
    inner = f"{indent} "
    lines = []
    for name, value in fields.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            items = f",\n{inner} ".join(json.dumps(item, default=str) for item in value)
            text = f"[\n{inner} {items}\n{inner}]"
        elif isinstance(value, dict) and any(isinstance(v, list | dict) for v in value.values()):
            text = _object_lines(value, inner)
        else:
            text = json.dumps(value, default=str)
        lines.append(f"{inner}{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def spread(values: Sequence[float], digits: int = 2, *, share: bool = False) -> str:
    """Return the median and, of more than one value, the lowest and highest."""
    if not values:
        return "–"
    shape = "{:.0%}" if share else f"{{:.{digits}f}}"
    middle, low, high = (
        shape.format(value) for value in (statistics.median(values), min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} [{low}, {high}]"


@dataclass(frozen=True)
class Command(Generic[RunT]):
    """``python -m benchmarks <name>``: measure, print the report, save it on request."""

    name: str
    parser: argparse.ArgumentParser
    measure: Callable[[argparse.Namespace, str], RunT]
    """Takes the arguments and the command line; raises ValueError or EngineProcessError."""
    markdown: Callable[[RunT], str]
    to_json: Callable[[RunT], str] = raw_numbers

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the command line; returns the exit status."""
        words = sys.argv[1:] if argv is None else list(argv)
        self.parser.add_argument(
            "--json", type=Path, metavar="FILE", help="also write the raw numbers here"
        )
        self.parser.add_argument(
            "--save", action="store_true", help="write a dated report under benchmarks/results/"
        )
        args = self.parser.parse_args(words)
        # A stopped engine cannot notice its parent's exit, so SIGTERM has to unwind the stack.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            run = self.measure(args, shlex.join(["python", "-m", "benchmarks", self.name, *words]))
        except (ValueError, EngineProcessError) as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            return 1
        report = self.markdown(run)
        print(report)
        if args.json is not None:
            args.json.write_text(self.to_json(run), encoding="utf-8")
        if args.save:
            save(self.name, run.started, run.machine, report, self.to_json(run))
        return 0


def positive(text: str) -> int:
    """Parse an argument that counts something; raises ArgumentTypeError below 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive integer")
    return value


def say(text: str) -> None:
    """Print a line of progress with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def save(name: str, started: str, machine: Machine, report: str, raw: str) -> None:
    """Write a report and its numbers under benchmarks/results/; `started` is an ISO time."""
    stem = f"{started[:10]}-{machine.slug}-{name}"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{stem}.md").write_text(report, encoding="utf-8")
    (RESULTS / f"{stem}.json").write_text(raw, encoding="utf-8")
    say(f"written: {RESULTS / stem}.md and .json")


def machine_lines(machine: Machine, load_before: float) -> list[str]:
    """Return the lines of a report that describe the machine."""
    lscpu = ", ".join(f"{name} {value}" for name, value in machine.lscpu.items())
    versions = ", ".join(f"{name} {value}" for name, value in machine.versions.items())
    return [
        f"- CPU: {lscpu}; {machine.cores} cores usable; of the instruction sets that matter: "
        f"{' '.join(machine.flags)}.",
        f"- Memory {machine.memory_bytes / 2**30:.0f} GiB; Linux {machine.kernel}; "
        f"load average before the run {load_before:.2f}.",
        f"- {versions}.",
    ]


def heading(title: str, run: RunHeader) -> list[str]:
    """Return the first lines of a report: title, command and machine."""
    return [
        f"# {title}, {run.started}",
        "",
        f"`{run.command}`",
        "",
        *machine_lines(run.machine, run.load_before),
    ]


def rotated(items: Sequence[T], number: int) -> list[T]:
    """Return `items` rotated by `number`, so that the first one changes with every round."""
    turn = number % max(1, len(items))
    return [*items[turn:], *items[:turn]]


def repeat_disturbed(take: Callable[[int], SampleT]) -> list[SampleT]:
    """Take a sample, again while it is disturbed, three times at most; return all of them.

    `take` gets the number of the attempt: a repeated prompt would be a prefix hit.
    """
    samples = [take(0)]
    while samples[-1].other_busy_cores > DISTURBED_CORES and len(samples) < MAX_SAMPLES:
        say(f"  disturbed: others kept {samples[-1].other_busy_cores:.2f} cores busy; again")
        samples.append(take(len(samples)))
    return samples


def disturbance(other_busy_cores: list[float], *, excluded: bool = False) -> str:
    """Return a report's sentence on other processes, from their busy cores per sample.

    `excluded` if disturbed samples were repeated and are in no figure.
    """
    disturbed = sum(cores > DISTURBED_CORES for cores in other_busy_cores)
    text = (
        "While a side was measured, other processes kept "
        f"{statistics.median(other_busy_cores):.2f} cores busy (median; at most "
        f"{max(other_busy_cores):.2f})."
    )
    if not disturbed:
        return text
    if excluded:
        return (
            f"Disturbed samples were repeated and are in no figure: in {disturbed} of "
            f"{len(other_busy_cores)} samples other processes kept more than {DISTURBED_CORES} "
            f"cores busy. {text}"
        )
    return (
        f"**Disturbed**: in {disturbed} of {len(other_busy_cores)} samples other processes kept "
        f"more than {DISTURBED_CORES} cores busy, so the times are not a measurement. {text}"
    )


OURS = "ours"
SHARE = "%"
_MISSING = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One quantity of one side: a value per round, None for a round that stayed disturbed.

    Values of the unit "%" are shares of 1.
    """

    name: str
    model: str
    side: str
    unit: str
    values: list[float | None]

    @property
    def known(self) -> list[float]:
        """Return the values of undisturbed rounds."""
        return [value for value in self.values if value is not None]

    @property
    def text(self) -> str:
        """Return the median, with the lowest and highest value in brackets."""
        return shown(self.known, self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRun(RunHeader):
    """All figures of one run; `sides` describes each side."""

    about: str
    sides: dict[str, str]
    figures: list[Figure]
    notes: list[str]


def shown(values: Sequence[float], unit: str) -> str:
    """Return the median and range in `unit`, with about three digits."""
    middle = statistics.median(values) if values else 0.0
    digits = 3 if middle < 1 else 2 if middle < 10 else 1 if middle < 100 else 0
    return spread(values, digits, share=unit == SHARE)


def find(figures: Iterable[Figure], name: str, model: str, side: str = OURS) -> Figure | None:
    """Return a figure with an undisturbed value, or None."""
    for figure in figures:
        if (figure.name, figure.model, figure.side) == (name, model, side) and figure.known:
            return figure
    return None


def ratios(above: Figure, below: Figure) -> list[float]:
    """Return the ratios of two figures by round, where both have a value."""
    pairs = zip(above.values, below.values, strict=False)
    return [a / b for a, b in pairs if a is not None and b]


def read_run(path: Path) -> FigureRun:
    """Return a saved run. Raises OSError, ValueError, or KeyError for another form."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields["machine"] = Machine(**fields["machine"])
    fields["figures"] = [Figure(**figure) for figure in fields["figures"]]
    return FigureRun(**fields)


def to_json(run: FigureRun) -> str:
    """Return the run as JSON, one figure a line, its values with six digits."""
    fields = asdict(run)
    for figure in fields["figures"]:
        figure["values"] = [None if v is None else float(f"{v:.6g}") for v in figure["values"]]
    return compact_json(fields)


def markdown(run: FigureRun) -> str:
    """Return the report of a run: a table of figures by side for each model."""
    lines = [*heading(run.about, run), *(f"- `{n}`: {note}." for n, note in run.sides.items()), ""]
    lines += [
        "Medians of the rounds, with the lowest and highest in brackets. A sample during which "
        "other processes kept more than 0.1 cores busy was repeated, at most twice; one that "
        f"stayed disturbed has no figure ({_MISSING}).",
        "",
        *(line for note in run.notes for line in (note, "")),
    ]
    for model in dict.fromkeys(figure.model for figure in run.figures):
        lines += [f"## {model}", "", *table(run.figures, model), ""]
    disturbed = sum(value is None for figure in run.figures for value in figure.values)
    values = sum(len(figure.values) for figure in run.figures)
    return "\n".join([*lines, f"{disturbed} of {values} values stayed disturbed."]) + "\n"


def table(figures: Sequence[Figure], model: str) -> Iterator[str]:
    """Yield the lines of a table of a model's figures, with a column for each side."""
    mine = [figure for figure in figures if figure.model == model]
    sides = list(dict.fromkeys(figure.side for figure in mine))
    rows = {figure.name: figure for figure in mine}
    peers = [side for side in sides if side != OURS] if OURS in sides else []
    yield f"| | unit | {' | '.join(sides)}{''.join(f' | ours / {p}' for p in peers)} |"
    yield "|" + "---|" * (2 + len(sides) + len(peers))
    for name, row in rows.items():
        found = {side: find(mine, name, model, side) for side in sides}
        cells = [_MISSING if figure is None else figure.text for figure in found.values()]
        ours = found.get(OURS)
        for peer in peers:
            other = found[peer]
            cells.append(spread(ratios(ours, other)) if ours and other else _MISSING)
        yield f"| {name} | {row.unit} | {' | '.join(cells)} |"
