"""Builds the C++ kernels once per host and makes one implementation of the ops active.

The library lies in ``<cache_root>/rbln/kernels/<key>/`` beside a record of its SHA-256; the key
covers the sources, the flags, the CPU and torch. A build happens in a private directory and
appears under its key in one rename, under a lock that processes share. Where there is no library
for this very CPU, one that was built ahead for a level it reaches (``variants``) spares the build.
A library that somebody else could have written is as good as absent (``trusted_files``); where the
cache root is open to others, this user's own store takes what is built. Compilers end with this
process, however it ends. Where building or loading is impossible, the PyTorch bodies of
``fallback`` take over, and the ``KernelSet`` says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from rbln_backend.emulator import fallback, ops
from rbln_backend.emulator.replay import Recording
from rbln_backend.emulator.targets import LEVELS, NATIVE, Target, cpu_lines
from rbln_backend.errors import ArtifactError, CompileError
from rbln_backend.host.file_locks import claimed_folder
from rbln_backend.host.trusted_files import make_trusted_folder
from rbln_backend.store.kernel_files import (
    LIBRARY,
    RECORD,
    State,
    examine,
    kernel_store,
    lock,
    make_record,
    open_library,
    private_stores,
    staging,
)

logger = logging.getLogger(__name__)

Mode = Literal["auto", "native", "aten"]

_SOURCE_DIR = Path(__file__).parent
_TORCH_DIR = Path(torch.__file__).parent
_PRIVATE = "rbln-kernels-"
_SOURCES = (
    "library",
    "attention_tensors",
    "attention",
    "window_attention",
    "linear",
    "pack",
    "norm",
    "rotary",
    "activation",
    "greedy",
    "moe",
    "moe_tensors",
    "lora",
    "lora_tensors",
    "channel",
    "channel_tensors",
    "quantized",
    "quantized_tensors",
    "replay",
    "team",
    "memory",
)
_OVER_TENSORS = (
    *("library", "attention_tensors", "moe_tensors", "lora_tensors", "channel_tensors"),
    "quantized_tensors",
    *("replay", "memory"),
)
# Contraction is off so that only written FMAs fuse: the same arithmetic on every code path.
_FLAGS = (
    "-O3 -std=c++20 -pthread -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -w"
).split()
_COMPILE_TIMEOUT_S = 300
# Sleeps until nobody holds the other end of its standard input, then kills its process group.
_GUARD = ("/bin/sh", "-c", "read _; kill -s KILL 0")
_HOW: dict[State, str] = {
    "absent": "built",
    "damaged": "rebuilt, the cached library was damaged,",
    "untrusted": "rebuilt, others could have written the cached library,",
}


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The active implementation of the kernel ops, and why it is the active one."""

    name: Literal["native", "aten"]
    isa: str  # "avx2", "avx512", "avx512_bf16", "portable", or "aten"
    library: Path | None
    reason: str

    @property
    def packs_linear(self) -> bool:
        """Whether packed linears are faster here than PyTorch's own."""
        return self.name == "native"


class _Active:
    """What this process has registered with the dispatcher."""

    native: KernelSet | None = None
    handle: ctypes.CDLL | None = None
    fallback: list[torch.library.Library] | None = None


def load_kernels(cache_root: Path, mode: Mode, *, bundles: Sequence[Path] = ()) -> KernelSet:
    """Make the kernels of ``mode`` active, building the library first where needed.

    ``bundles`` are other cache roots, which are read alone.

    "native" raises ``CompileError`` when the library cannot be built or loaded; "auto" falls back
    to PyTorch then; "aten" never builds. Repeated calls are cheap and may change the mode.
    """
    assert ops.LIBRARY.ns == ops.NAMESPACE
    if mode == "aten":
        return _activate_fallback("requested")
    try:
        return _activate_native([cache_root, *bundles])
    except CompileError as error:
        if mode == "native":
            raise
        logger.warning("running without native kernels: %s", error)
        return _activate_fallback(str(error))


def _activate_fallback(reason: str) -> KernelSet:
    if _Active.fallback is None:
        _Active.fallback = fallback.register()
    return KernelSet("aten", "aten", None, reason)


def _activate_native(roots: Sequence[Path]) -> KernelSet:
    if _Active.native is None:
        _Active.native = _load(
            [kernel_store(roots[0]), *private_stores()], [kernel_store(root) for root in roots[1:]]
        )
    for library in _Active.fallback or ():
        library._destroy()
    _Active.fallback = None
    return _Active.native


def _load(own: Sequence[Path], bundles: Sequence[Path] = ()) -> KernelSet:
    """The first of the ``own`` stores that only this user can write takes what has to be built."""
    stores = [*own, *bundles]
    refused, found = why_refused(stores), find_built(stores)
    if refused and found:
        logger.warning("%s", refused)
        found = found[0], f"{found[1]}; {refused}"
    try:
        entry, how = found or _build_into(own)
    except OSError as error:
        return _build_for_process(str(error))
    try:
        return _open_library(entry, how)
    except (OSError, ArtifactError) as error:
        # Built elsewhere, for another C library, say; the process's own cannot have that fault.
        return _build_for_process(f"the library in {entry} cannot be loaded: {error}")


def _build_into(stores: Sequence[Path]) -> tuple[Path, str]:
    """A library in the first store that will do; raises ``OSError`` when none will."""
    reasons: list[str] = []
    for store in stores:
        try:
            make_trusted_folder(store)
            entry, how = find_or_build(store / build_key())
            return entry, "; ".join((how, *reasons))
        except OSError as error:
            reasons.append(str(error))
            logger.warning("kernels are not kept in %s: %s", store, error)
    raise OSError("; ".join(reasons))


def _build_for_process(why: str) -> KernelSet:
    """A private copy serves this process; the loaded library outlives its file."""
    try:
        with claimed_folder(Path(tempfile.gettempdir()), _PRIVATE, f"{_PRIVATE}*/") as private:
            _build(private, NATIVE)
            return _open_library(private, f"built for this process: {why}")
    except (OSError, ArtifactError) as error:
        raise CompileError(f"a kernel library for this process cannot be had: {error}") from error


def kernel_stores(cache_root: str, bundles: Sequence[str]) -> list[Path]:
    """Where a process with these roots looks for libraries, in that order."""
    first, *others = (kernel_store(Path(root)) for root in (cache_root, *bundles))
    return [first, *private_stores(), *others]


def find_built(stores: Sequence[Path]) -> tuple[Path, str] | None:
    """The library for this very CPU, else the one for the best level that the CPU reaches."""
    states = {store / build_key(): examine(store / build_key())[0] for store in stores}
    for native, state in states.items():
        if state == "whole":
            return native, "loaded from the cache"
    if "damaged" in states.values() and can_build():
        # It was the better one, and is rebuilt.
        return None
    for level in (level for level in LEVELS if level.runs_here()):
        for entry in (store / build_key(level) for store in stores):
            if examine(entry)[0] == "whole":
                return entry, f"built ahead for CPUs with {level.name}"
    return None


def why_refused(stores: Sequence[Path]) -> str:
    """Why a library for this CPU that lies in one of ``stores`` is not run; "" if none lies so."""
    usable = (NATIVE, *(level for level in LEVELS if level.runs_here()))
    for entry in (store / build_key(target) for target in usable for store in stores):
        state, why = examine(entry)
        if state == "untrusted":
            return f"the kernels in {entry} are not run: {why}"
    return ""


def _open_library(entry: Path, reason: str) -> KernelSet:
    """Load the very file that was verified, whatever has come to lie under its name since."""
    # Never closed: the name by which the library is loaded must not come to mean another file.
    descriptor = open_library(entry)
    _Active.handle = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    describe = _Active.handle.rbln_emulator_isa
    describe.restype = ctypes.c_char_p
    return KernelSet("native", describe().decode(), entry / LIBRARY, reason)


def packs_weights() -> bool:
    """Whether the active kernels want weights in their own layout (``pack_linear_weight``)."""
    return _Active.native is not None and _Active.fallback is None


def native_library() -> ctypes.CDLL | None:
    """The loaded library while the native kernels are the active ones."""
    return _Active.handle if packs_weights() else None


def set_threads(threads: int) -> None:
    """Let the active kernels use ``threads`` threads, the caller's included; results stay the same.

    The native kernels have a team of their own, so torch's operators then keep to one thread: two
    teams would spin against each other on the same cores. The fallback runs on torch's.
    """
    if _Active.fallback is not None or _Active.handle is None:
        torch.set_num_threads(threads)
        return
    torch.set_num_threads(1)
    _Active.handle.rbln_emulator_set_threads(threads)


def start_recording(*, is_rehearsal: bool = False) -> Recording:
    """Record the native calls of this thread from now on; the native kernels are active."""
    assert _Active.handle is not None
    return Recording(_Active.handle, is_rehearsal=is_rehearsal)


def build_key(target: Target = NATIVE) -> str:
    """32 hex digits naming what a built library depends on."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCE_DIR.glob("*.cpp")) + sorted(_SOURCE_DIR.glob("*.h")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    words = [*_FLAGS, *target.flags, torch.__version__, platform.machine()]
    if target is NATIVE:
        # What -march=native looks at. Where torch lies does not matter: the library finds it by
        # name among what the process has loaded.
        words += cpu_lines() or (platform.processor(),)
    digest.update("\0".join(words).encode())
    return digest.hexdigest()[:32]


def find_or_build(entry: Path, target: Target = NATIVE) -> tuple[Path, str]:
    """The directory ``entry`` with an undamaged library in it, and how it got there."""
    if examine(entry)[0] == "whole":
        return entry, "loaded from the cache"
    with lock(entry):
        state, _ = examine(entry)
        if state == "whole":
            return entry, "loaded from the cache"
        logger.info("building the kernels (%s) takes a minute or so", target.name)
        with staging(entry) as directory:
            seconds = _build(directory, target)
        logger.info("Compile time of the kernels (%s): %.1f s", target.name, seconds)
    return entry, f"{_HOW[state]} in {seconds:.1f} s"


def can_build() -> bool:
    """Whether there is a compiler."""
    return shutil.which("g++") is not None


def _build(directory: Path, target: Target) -> float:
    """Compile and link into ``directory``; returns the seconds it took. Raises CompileError."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise CompileError("no C++ compiler: g++ is not on PATH")
    began = time.monotonic()
    objects = [str(directory / f"{name}.o") for name in _SOURCES]
    flags = [*_FLAGS, *target.flags]
    commands = [
        # Pipes: a compiler that is killed leaves its temporary files.
        _compile_command([compiler, "-pipe", "-c", *flags], name, made)
        for name, made in zip(_SOURCES, objects, strict=True)
    ]
    with _compilers() as group:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(partial(_run, group=group), commands))
        _run(_link_command(compiler, objects, directory / LIBRARY), group=group)
    for path in objects:
        Path(path).unlink()
    library = (directory / LIBRARY).read_bytes()
    (directory / RECORD).write_bytes(make_record(library, target.name))
    return time.monotonic() - began


def _compile_command(compiler: list[str], name: str, target: str) -> list[str]:
    command = [*compiler, str(_SOURCE_DIR / f"{name}.cpp"), "-o", target]
    if name in _OVER_TENSORS:
        # Glue code: torch's headers are nearly all of its cost, and optimising it buys nothing.
        command += ["-O1", f"-I{_TORCH_DIR / 'include'}"]
    return command


def _link_command(compiler: str, objects: list[str], target: Path) -> list[str]:
    folder = _TORCH_DIR / "lib"
    return [
        *(compiler, "-shared", "-o", str(target), *objects, f"-L{folder}"),
        *("-ltorch_cpu", "-lc10", "-pthread", "-Wl,--no-undefined"),
    ]


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
