"""Shared parts of the measuring commands: arguments, progress on standard error, results."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.engines.engine_process import EngineProcessError
from benchmarks.engines.sleeping_process import SleepingProcess
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
ProcessT = TypeVar("ProcessT", bound=SleepingProcess)


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


@contextmanager
def started(processes: Iterable[ProcessT]) -> Iterator[list[ProcessT]]:
    """Start the processes, with logs in a temporary folder, and end them after the block."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rbln-bench-")))
        living = []
        for process in processes:
            say(f"  starting {process.side.name}")
            process.log = folder / f"{process.side.name}.log"
            stack.enter_context(process)
            living.append(process)
        yield living


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
