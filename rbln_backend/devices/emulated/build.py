"""Compiles the C++ kernels of ``kernels/``, for this CPU or for all CPUs of a level.

The library lies in ``<cache_root>/rbln/kernels/<key>/`` beside a record of its SHA-256; the key
covers the sources, the flags, the CPU and torch. A build happens in a private directory and
appears under its key in one rename, under a lock that processes share. Compilers end with this
process, however it ends.

``python -m rbln_backend.devices.emulated.build --into CACHE_ROOT`` builds ahead, for this CPU
during an installation, for others in an image. It puts one library per level where
``kernel_set.load_kernels`` looks, which takes the best one that its host can run. It needs no
package but torch, and that one's files alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from rbln_backend.errors import CompileError
from rbln_backend.graphs.kernel_files import (
    LIBRARY,
    RECORD,
    State,
    examine,
    kernel_store,
    lock,
    make_record,
    staging,
)
from rbln_backend.host.files import make_trusted_folder

logger = logging.getLogger(__name__)

_AVX2 = frozenset("avx2 fma f16c bmi1 bmi2 movbe abm".split())
_AVX512 = _AVX2 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
# Zen 4 and Sapphire Rapids, and what came after them. Cooper Lake, without VBMI, runs as "avx512".
_BF16 = _AVX512 | frozenset("avx512_bf16 avx512_vnni avx512vbmi".split())


@dataclass(frozen=True, slots=True)
class Target:
    """Compiler flags, and the CPU features (names of /proc/cpuinfo) that their code needs.

    `machine` is the architecture, as `platform.machine()` names it.
    """

    name: str
    flags: tuple[str, ...]
    features: frozenset[str] = frozenset()
    machine: str = "x86_64"

    def runs_here(self) -> bool:
        """Return True if this host's CPU has all features that the library needs."""
        return platform.machine() == self.machine and self.features <= cpu_features()


NATIVE = Target("native", ("-march=native",))
# The best first. Names are those by which a library calls its own instruction set.
LEVELS = (
    Target(
        "avx512_bf16",
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi"),
        _BF16,
    ),
    Target("avx512", ("-march=x86-64-v4",), _AVX512),
    Target("avx2", ("-march=x86-64-v3",), _AVX2),
    Target("neon", ("-march=armv8-a",), frozenset(("asimd",)), "aarch64"),
    Target("portable", ("-march=x86-64",)),
)


def buildable_levels() -> tuple[Target, ...]:
    """Return the levels of this machine's architecture, the best first."""
    return tuple(level for level in LEVELS if level.machine == platform.machine())


@cache
def cpu_lines() -> tuple[str, ...]:
    """Return model and features of the first CPU from /proc/cpuinfo; empty if it is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return ()
    wanted = ("model name", "flags", "Features", "CPU part")
    return tuple(line for line in lines if line.startswith(wanted))


@cache
def cpu_features() -> frozenset[str]:
    """The names that /proc/cpuinfo lists."""
    lists = (
        line.partition(":")[2] for line in cpu_lines() if line.startswith(("flags", "Features"))
    )
    return frozenset(word for words in lists for word in words.split())


def cpu_name() -> str:
    """Return the CPU's model name, else its architecture."""
    named = (line.partition(":")[2].strip() for line in cpu_lines() if line.startswith("model"))
    return next(named, platform.machine())


_SOURCE_DIR = Path(__file__).parent / "kernels"
# Sources in this folder of it see torch's headers.
_BINDINGS = "bindings"
# Contraction is off so that only written FMAs fuse: the same arithmetic on every code path. How a
# vector is passed to a function depends on the instruction set, but none is passed between objects.
_FLAGS = (
    "-O2 -std=c++20 -pthread -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno"
    " -Wall -Wextra -Wno-psabi"
).split()
# Of one call, which takes a minute of processor time at most: against a compiler that hangs, not
# against a host that gives it a twentieth of a core.
_COMPILE_TIMEOUT_S = 3600
# Sleeps until the other end of its standard input closes, then kills its process group.
_GUARD = ("/bin/sh", "-c", "read _; kill -s KILL 0")
_HOW: dict[State, str] = {
    "absent": "built",
    "damaged": "rebuilt, the cached library was damaged,",
    "untrusted": "rebuilt, others could have written the cached library,",
}


def build_key(target: Target = NATIVE) -> str:
    """32 hex digits naming what a built library depends on."""
    digest = hashlib.sha256()
    for source in _sources(".cpp", ".h"):
        digest.update(source.as_posix().encode() + b"\0" + (_SOURCE_DIR / source).read_bytes())
    words = [
        *_FLAGS,
        *target.flags,
        # Without a local label: builds of one release for a CPU and for a GPU have one interface.
        importlib.metadata.version("torch").partition("+")[0],
        platform.machine(),
    ]
    if target is NATIVE:
        # What -march=native looks at. Where torch lies does not matter: the library finds it by
        # name among what the process has loaded.
        words += cpu_lines() or (platform.processor(),)
    digest.update("\0".join(words).encode())
    return digest.hexdigest()[:32]


BuildReport = Callable[[int, int], None]
"""Called with the number of compiled sources and of all."""


def no_op(_done: int, _of: int) -> None:
    """Ignore the progress report."""


def find_or_build(
    entry: Path, target: Target = NATIVE, report: BuildReport = no_op
) -> tuple[Path, str]:
    """The directory ``entry`` with an undamaged library in it, and how it got there."""
    if examine(entry)[0] == "whole":
        return entry, "loaded from the cache"
    with lock(entry):
        state, _ = examine(entry)
        if state == "whole":
            return entry, "loaded from the cache"
        with staging(entry) as directory:
            seconds = build_library(directory, target, report)
        logger.info("Compile time of the kernels (%s): %.1f s", target.name, seconds)
    return entry, f"{_HOW[state]} in {seconds:.1f} s"


def can_build() -> bool:
    """Return True if a C++ compiler is installed."""
    return shutil.which("g++") is not None


def build_library(directory: Path, target: Target, report: BuildReport = no_op) -> float:
    """Compile and link into ``directory``; returns the seconds it took. Raises CompileError."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise CompileError("no C++ compiler: g++ is not on PATH")
    began = time.monotonic()
    # Pipes: a compiler that is killed leaves its temporary files.
    command = [compiler, "-pipe", "-c", *_FLAGS, *target.flags, "-iquote", str(_SOURCE_DIR)]
    with TemporaryDirectory(dir=directory) as scratch, _compilers() as group:
        units = _units(Path(scratch))
        objects = [f"{scratch}/{number}.o" for number in range(len(units))]
        commands = [
            [*command, *unit, "-o", made] for unit, made in zip(units, objects, strict=True)
        ]
        report(0, len(commands))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = [pool.submit(_run, command, group=group) for command in commands]
            for number, unit in enumerate(as_completed(compiled), 1):
                unit.result()
                report(number, len(commands))
        folder = _torch_folder() / "lib"
        link = [compiler, "-shared", "-o", str(directory / LIBRARY), *objects, f"-L{folder}"]
        link += ["-ltorch_cpu", "-lc10", "-pthread", "-Wl,--no-undefined"]
        _run(link, group=group)
    library = (directory / LIBRARY).read_bytes()
    (directory / RECORD).write_bytes(make_record(library, target.name))
    return time.monotonic() - began


def _sources(*suffixes: str) -> list[Path]:
    """Every file of the kernels with one of ``suffixes``, relative to their folder, in order."""
    files = (path for path in _SOURCE_DIR.rglob("*") if path.suffix in suffixes)
    return sorted(path.relative_to(_SOURCE_DIR) for path in files)


def _units(scratch: Path) -> list[tuple[str, ...]]:
    """Return the sources of each compiler call; those with torch's headers share one.

    Those headers are nearly all of their cost, and optimising them buys nothing.
    """
    sources = _sources(".cpp")
    over_torch = [source for source in sources if source.parts[0] == _BINDINGS]
    together = scratch / f"{_BINDINGS}.cpp"
    together.write_text("".join(f'#include "{source}"\n' for source in over_torch))
    return [
        (str(together), "-O1", "-isystem", str(_torch_folder() / "include")),
        *((str(_SOURCE_DIR / source),) for source in sources if source not in over_torch),
    ]


def _torch_folder() -> Path:
    """Where torch lies; not imported, for a build while other packages are still to come."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CompileError("the kernel build failed: torch is not installed")
    return Path(spec.origin).parent


@contextmanager
def _compilers() -> Iterator[int]:
    """Yield a process group that is killed when the block ends, or this process does.

    A signal at the parent's death would reach g++ alone, not what it has started.
    """
    try:
        guard = subprocess.Popen(
            _GUARD,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
    except OSError as error:
        raise CompileError(f"the kernel build failed: {error}") from error
    # Leaving closes the pipe and waits.
    with guard:
        yield guard.pid


def _run(command: list[str], *, group: int) -> None:
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
            check=False,
            process_group=group,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"the kernel build failed: {error}") from error
    if result.returncode != 0:
        first = "\n".join(result.stderr.strip().splitlines()[:8])
        raise CompileError(f"the kernel build failed: {' '.join(command[:2])} ...\n{first}")


def build_variants(cache_root: Path, names: Sequence[str]) -> list[Path]:
    """The libraries of the targets in ``names``, built where missing; raises ``CompileError``."""
    store = kernel_store(cache_root)
    try:
        make_trusted_folder(store)
    except OSError as error:
        raise CompileError(f"kernels cannot be built there: {error}") from error
    entries = []
    for level in (level for level in (NATIVE, *buildable_levels()) if level.name in names):
        entry, how = find_or_build(store / build_key(level), level)
        logger.info("%s: %s, %s", level.name, entry, how)
        entries.append(entry)
    return entries


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    known = [level.name for level in buildable_levels()]
    parser = argparse.ArgumentParser(description="Build the kernels ahead of the first start.")
    parser.add_argument("--into", type=Path, required=True, help="cache root to build into")
    parser.add_argument(
        "--variants", nargs="+", default=["all"], choices=["all", NATIVE.name, *known]
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build_variants(options.into, known if "all" in options.variants else options.variants)


if __name__ == "__main__":
    main()
