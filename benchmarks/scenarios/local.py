"""Scenarios of a kernel, of the engine process and of starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.engines.engine_process import clean_environment
from benchmarks.engines.server_process import ServerError, ServerProcess, ServerSide, Serving
from benchmarks.in_process.step_profile import OUTSIDE_ROW
from benchmarks.models.shapes import find_checkpoint
from benchmarks.runner.command import rotated, say
from benchmarks.runner.machine import ChildMeter
from benchmarks.scenarios.bench import Bench, Sample, Values, checkpoint_folder

_PROMPT, _CHUNK = 7000, 256


def run_kernels(bench: Bench) -> None:
    """Fill the figures; ours runs in this process, with all threads."""
    for model in bench.models:
        checkpoint = find_checkpoint(model).path
        for number in range(bench.rounds):
            bench.check_time()
            bench.take(model, "ours", number, partial(_attention, checkpoint))


def _attention(checkpoint: Path, _attempt: int) -> Sample:
    import torch

    from benchmarks.in_process.kernels import CACHE_ROOT, attention_case, best_seconds
    from benchmarks.runner.machine import measure_limits
    from rbln_backend.devices.emulated.kernel_set import load_kernels, set_threads

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    heads = config["num_key_value_heads"]
    shape = (heads, config["num_attention_heads"] // heads, config["head_dim"])
    load_kernels(CACHE_ROOT, "native")
    set_threads(len(os.sched_getaffinity(0)))
    meter = ChildMeter()
    with torch.inference_mode():
        case = attention_case(torch.bfloat16, 1, *shape, _PROMPT - _CHUNK, _CHUNK)
        seconds = best_seconds(case.ours)
    busy = meter.other_busy_cores()
    share = measure_limits(case.moved).seconds(case.moved, case.flops) / seconds
    return Sample({"attention of a chunk over 7,000 tokens, of the limit": (share, "%")}, busy)


_BATCHES = (1, 8, 32)


def run_engine_process(bench: Bench) -> None:
    for model in bench.models:
        for number in range(bench.rounds):
            bench.check_time()
            bench.take(model, "ours", number, lambda _, m=model: _step_sample(bench, m))  # type: ignore[misc]


def _step_sample(bench: Bench, model: str) -> Sample:
    file = bench.folder / "steps.json"
    words = ["--model", model, "--batch", *map(str, _BATCHES), "--json", str(file)]
    steps = ["--steps", "50" if bench.quick else "600"]
    subprocess.run(
        [sys.executable, "-m", "benchmarks", "step_profile", *words, *steps],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    values: Values = {}
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    for result in results:
        name = f"engine process outside the graph, batch {result['batch']}"
        values[name] = (result["parts"][OUTSIDE_ROW][0], "µs")
    return Sample(values, max(result["other_busy_cores"] for result in results))


KINDS = {
    "cold": "an empty cache root: kernels are built, graphs captured",
    "kernels": "kernels are there, graphs captured",
    "warm": "a cache root that an earlier server filled, files in the page cache",
    "evicted": "the same, checkpoint and cache root dropped from the page cache "
    "(POSIX_FADV_DONTNEED)",
    "import": "an empty cache root that a bundle was imported into, the import included",
    "mounted": "the exported folder itself as a cache root that cannot be written",
}
_LARGE_FLAGS = ("--max-num-seqs", "64", "--max-model-len", "8192")
_LARGE_MODEL = "160m"
_LARGE_NAME = "first start with prepared kernels, 64 sequences, context 8,192"


# Kinds alternate in every round. The sides of the command are the kinds of start.


def run_starts(bench: Bench) -> None:
    kinds = [kind for kind in bench.sides if kind in KINDS]
    bench.described |= {kind: KINDS[kind] for kind in kinds}
    for model in bench.models:
        folder = bench.folder / Path(model).name
        is_exported = not {"import", "mounted"}.isdisjoint(kinds)
        starts = StartKinds(checkpoint_folder(model), (), folder, is_exported=is_exported)
        for number in range(1 if bench.quick else bench.rounds):
            for kind in rotated(kinds, number):
                bench.check_time()
                take = partial(starts.sample, kind, f"{kind} start to the first answer")
                bench.take(Path(model).name, "ours", number, take)
        if model == _LARGE_MODEL and "kernels" in kinds and not bench.quick:
            flags = (*_LARGE_FLAGS, "--hf-overrides", '{"max_position_embeddings": 8192}')
            large = StartKinds(
                checkpoint_folder(model), flags, folder / "large", volume=starts.volume
            )
            bench.take(model, "ours", 0, partial(large.sample, "kernels", _LARGE_NAME))
        shutil.rmtree(folder, ignore_errors=True)


class StartKinds:
    """A filled volume, a bundle of it, and new cache roots for the starts that need one."""

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        folder: Path,
        *,
        volume: Path | None = None,
        is_exported: bool = False,
    ) -> None:
        """Fill a volume with `flags`, unless one is given, and export it if `is_exported`."""
        self._model, self._flags, self._folder = model, list(flags), folder
        self._mounted, self._bundle = folder / "mounted", folder / "bundle.tar"
        self._count = 0
        self.volume = volume or folder / "volume"
        folder.mkdir(parents=True)
        if volume is None:
            say("  filling the volume")
            self._run(self.volume, "compile", str(model), *flags)
        if is_exported:
            report = self._run(self.volume, "cache", "export", str(self._bundle))
            self._digest = report.split()[0]
            self._run(self.volume, "cache", "export", "--directory", str(self._mounted))

    def sample(self, kind: str, name: str, _attempt: int) -> Sample:
        """Start a server of `kind` and let it answer; `name` is that of the figure."""
        self._count += 1
        root = self._folder / f"root-{self._count}"
        if kind == "kernels":
            shutil.copytree(self.volume / "rbln" / "kernels", root / "rbln" / "kernels")
        elif kind == "evicted":
            evict(self._model, self.volume)
        meter = ChildMeter()
        if kind == "import":
            self._run(root, "cache", "import", str(self._bundle), "--digest", self._digest)
        imported = meter.seconds() if kind == "import" else 0.0
        places = {"warm": self.volume, "evicted": self.volume, "mounted": self._mounted}
        log = self._folder / f"{kind}-{self._count}.log"
        serving = Serving.of(self._model)
        with ServerProcess(self._side(kind), serving, log, places.get(kind, root)) as server:
            used = server.cpu_seconds()
            others = meter.other_busy_cores(used.http + used.engine)
            values: Values = {name: (imported + server.answered_s, "s")}
            values[f"{name}, of it the first request"] = (server.answered_s - server.ready_s, "s")
        shutil.rmtree(root, ignore_errors=True)
        return Sample(values, others)

    def _side(self, kind: str) -> ServerSide:
        def command(serving: Serving) -> list[str]:
            words = [sys.executable, "-m", "server", "serve", str(serving.text_model)]
            return [*words, "--host", "127.0.0.1", "--port", str(serving.port), *self._flags]

        # For root, only this makes a folder read-only.
        env = {"VLLM_RBLN_CACHE_READ_ONLY": "1"} if kind == "mounted" else {}
        return ServerSide(name=kind, note=KINDS[kind], command=command, ready="/readyz", env=env)

    def _run(self, root: Path, *words: str) -> str:
        env = {**clean_environment({}), "VLLM_CACHE_ROOT": str(root)}
        command = [sys.executable, "-m", "server", *words]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            env=env,
            cwd=Path(__file__).parents[2],
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ServerError(f"rbln-serve {words[0]} ended with status {done.returncode}")
        return done.stdout


def evict(*folders: Path) -> None:
    """Drop the files below the folders from the page cache."""
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            # Dirty pages stay in the cache.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
