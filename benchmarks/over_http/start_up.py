"""Time of a server's start to its first token: cold, from a volume, from a bundle.

``python -m benchmarks start_up MODEL [MODEL ...] --save``. Kinds alternate in every repeat, each
with its own cache root, so that drift of the machine affects all. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines.engine_process import clean_environment
from benchmarks.engines.server_process import ServerError, ServerProcess, ServerSide, Serving
from benchmarks.models.shapes import SHAPES, find_checkpoint
from benchmarks.models.text_checkpoint import text_checkpoint
from benchmarks.runner.command import (
    Command,
    RunHeader,
    begin,
    machine_lines,
    positive,
    say,
    spread,
)

KINDS = {
    "cold": "an empty cache root: kernels are built, graphs captured",
    "kernels": "kernels are there, graphs captured",
    "volume": "a cache root that an earlier server filled",
    "import": "an empty cache root that a bundle was imported into, the import included",
    "mounted": "the exported folder itself as a cache root that cannot be written",
}
_GRAPH = re.compile(r"rbln: \[\d+/\d+\] \S+ (compiled|loaded) in")
_LISTENING_AND_MORE = ("listening_s", "ready_s", "answered_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """One start, in seconds from the process's; `import_s` came before."""

    kind: str
    repeat: int
    import_s: float
    listening_s: float
    ready_s: float
    answered_s: float
    compiled: int
    loaded: int
    load_average: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStarts:
    """All starts of one model."""

    model: str
    bundle_bytes: int
    samples: list[StartUp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """All starts of one command."""

    flags: list[str]
    models: list[ModelStarts]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return Command("start_up", _parser(), _measure, markdown).main(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks start_up", description=__doc__)
    about = f"a checkpoint folder, or a name of models/shapes.py: {', '.join(SHAPES)}"
    parser.add_argument("models", nargs="+", metavar="MODEL", help=about)
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="default: 3")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument(
        "--flag",
        action="append",
        default=[],
        metavar="=--FLAG",
        help="a word for `serve`, as it is",
    )
    return parser


def _measure(args: argparse.Namespace, command: str) -> Run:
    paths = {name: _checkpoint(name) for name in args.models}
    begun = begin(command)
    return Run(
        **begun,
        flags=args.flag,
        models=[_measure_model(Path(name).name, path, args) for name, path in paths.items()],
    )


def _checkpoint(name: str) -> Path:
    """Return the checkpoint of a folder or name. Raises ValueError for anything else."""
    if name in SHAPES:
        return text_checkpoint(find_checkpoint(name).path)
    if not (Path(name) / "config.json").is_file():
        raise ValueError(f"{name} is no checkpoint folder")
    return Path(name).resolve()


def _measure_model(name: str, path: Path, args: argparse.Namespace) -> ModelStarts:
    with tempfile.TemporaryDirectory(prefix="rbln-start-up-") as folder:
        bench = _Bench(path, args.flag, Path(folder))
        bench.prepare()
        samples = []
        for repeat in range(args.repeats):
            # The first kind changes, because each leaves files in the page cache for the next.
            turn = repeat % len(args.kinds)
            for kind in (*args.kinds[turn:], *args.kinds[:turn]):
                samples.append(bench.sample(kind, repeat))
                say(f"{name} {repeat + 1}/{args.repeats} {kind}: {samples[-1].answered_s:.1f} s")
        bundle_bytes = bench.bundle.stat().st_size
    return ModelStarts(model=name, bundle_bytes=bundle_bytes, samples=samples)


class _Bench:
    """A volume, a bundle of it, and new cache roots for the starts that need one."""

    def __init__(self, model: Path, flags: Sequence[str], folder: Path) -> None:
        self._model = model
        self._flags = list(flags)
        self._folder = folder
        self._volume = folder / "volume"
        self._mounted = folder / "mounted"
        self._count = 0
        self.bundle = folder / "bundle.tar"
        self._digest = ""

    def prepare(self) -> None:
        """Fill the volume and export it, both by the commands that operators use."""
        say("filling the volume")
        self._run(self._volume, "compile", str(self._model), *self._flags)
        exported = self._run(self._volume, "cache", "export", str(self.bundle))
        self._digest = exported.split()[0]
        self._run(self._volume, "cache", "export", "--directory", str(self._mounted))

    def sample(self, kind: str, repeat: int) -> StartUp:
        """Start a server of ``kind`` and let it answer."""
        self._count += 1
        root = self._folder / f"root-{self._count}"
        began = time.perf_counter()
        makers: dict[str, Callable[[Path], Path]] = {
            "cold": lambda root: root,
            "kernels": self._with_kernels,
            "volume": lambda _: self._volume,
            "import": self._imported,
            "mounted": lambda _: self._mounted,
        }
        root = makers[kind](root)
        prepared = time.perf_counter() - began if kind == "import" else 0.0
        log = self._folder / f"{kind}-{repeat}.log"
        try:
            with ServerProcess(self._side(kind), Serving.of(self._model), log, root) as server:
                times = {name: getattr(server, name) for name in _LISTENING_AND_MORE}
        except ServerError as error:
            raise ValueError(str(error)) from error
        results = _GRAPH.findall(log.read_text(encoding="utf-8", errors="replace"))
        shutil.rmtree(self._folder / f"root-{self._count}", ignore_errors=True)
        return StartUp(
            kind=kind,
            repeat=repeat,
            import_s=prepared,
            compiled=results.count("compiled"),
            loaded=results.count("loaded"),
            load_average=os.getloadavg()[0],
            **times,
        )

    def _with_kernels(self, root: Path) -> Path:
        shutil.copytree(self._volume / "rbln" / "kernels", root / "rbln" / "kernels")
        return root

    def _imported(self, root: Path) -> Path:
        self._run(root, "cache", "import", str(self.bundle), "--digest", self._digest)
        return root

    def _side(self, kind: str) -> ServerSide:
        def command(serving: Serving) -> list[str]:
            words = [sys.executable, "-m", "server", "serve", str(serving.text_model)]
            return [*words, "--host", "127.0.0.1", "--port", str(serving.port), *self._flags]

        # For root, only this makes a folder read-only.
        env = {"VLLM_RBLN_CACHE_READ_ONLY": "1"} if kind == "mounted" else {}
        return ServerSide(
            name=f"start_up {kind}", note=KINDS[kind], command=command, ready="/readyz", env=env
        )

    def _run(self, root: Path, *words: str) -> str:
        env = {**clean_environment({}), "VLLM_CACHE_ROOT": str(root)}
        done = subprocess.run(
            [sys.executable, "-m", "server", *words],
            stdout=subprocess.PIPE,
            env=env,
            cwd=Path(__file__).parents[2],
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ValueError(f"rbln-serve {words[0]} ended with status {done.returncode}")
        return done.stdout


def markdown(run: Run) -> str:
    """Return the report."""
    lines = [
        "# Start-up",
        "",
        f"`{run.command}`, {run.started}.",
        "",
        *machine_lines(run.machine, run.load_before),
        "",
        "Seconds from the start of the process, median (least to most). *First token* is the end "
        "of a completion of one token; with *import* the time of `rbln-serve cache import` is part "
        "of it.",
        "",
        "| model | start | listening | ready | first token | of it import | compiled | loaded |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for starts in run.models:
        for kind in KINDS:
            samples = [sample for sample in starts.samples if sample.kind == kind]
            if samples:
                lines.append(f"| {starts.model} {_row(kind, samples)}")
    lines += ["", *(f"- *{kind}*: {about}." for kind, about in KINDS.items())]
    sizes = [f"{starts.model} {starts.bundle_bytes / 1e6:.1f} MB" for starts in run.models]
    lines.append(f"- The bundles: {', '.join(sizes)}.")
    loads = [sample.load_average for starts in run.models for sample in starts.samples]
    lines += ["", f"Load average after each start: {min(loads):.1f} to {max(loads):.1f}.", ""]
    return "\n".join(lines)


def _row(kind: str, samples: Sequence[StartUp]) -> str:
    graphs = {(sample.compiled, sample.loaded) for sample in samples}
    compiled_counts = " or ".join(f"{compiled}" for compiled, _ in sorted(graphs))
    loaded = " or ".join(f"{loaded}" for _, loaded in sorted(graphs))
    return (
        f"| {kind} | {spread([s.listening_s for s in samples], 1)} "
        f"| {spread([s.import_s + s.ready_s for s in samples], 1)} "
        f"| {spread([s.import_s + s.answered_s for s in samples], 1)} "
        f"| {spread([s.import_s for s in samples], 1)} | {compiled_counts} | {loaded} |"
    )
