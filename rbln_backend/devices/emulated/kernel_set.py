"""Finds the C++ kernels, or has them built, and makes one implementation of the ops active.

Where there is no library for this very CPU, one that was built ahead for a level it reaches spares
the build. A library that another user could have written is as good as absent (``trusted_files``);
where the cache root is open to others, this user's own store takes what is built. Where building or
loading is impossible, the PyTorch bodies of ``fallback`` take over, and the ``KernelSet`` says why.
"""

from __future__ import annotations

import ctypes
import logging
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rbln_backend.devices.emulated import fallback
from rbln_backend.devices.emulated.build import (
    LEVELS,
    NATIVE,
    BuildReport,
    Target,
    build_key,
    build_library,
    can_build,
    find_or_build,
    no_op,
)
from rbln_backend.errors import ArtifactError, CompileError
from rbln_backend.graphs.kernel_files import (
    LIBRARY,
    examine,
    kernel_store,
    open_library,
    private_stores,
)
from rbln_backend.host.files import claimed_folder, make_trusted_folder


class Recording:
    """The native calls that a thread makes between creation and ``end``, to be made again.

    In a rehearsal native calls are kept but not made: their results hold anything.
    """

    def __init__(self, library: ctypes.CDLL, *, is_rehearsal: bool = False) -> None:
        self._count = library.rbln_emulator_recorded_calls
        self._count.argtypes, self._count.restype = (ctypes.c_int64,), ctypes.c_int64
        self._replay = library.rbln_emulator_replay
        self._replay.restype = ctypes.c_char_p
        self._replay.argtypes = (*(ctypes.c_int64,) * 3, ctypes.c_int)
        self._last_write = library.rbln_emulator_last_cache_write
        self._last_write.argtypes, self._last_write.restype = (ctypes.c_int64,), ctypes.c_int64
        self.end = library.rbln_emulator_end_recording
        """Calls are made as usual from now on."""
        begin = library.rbln_emulator_begin_recording
        begin.argtypes, begin.restype = (ctypes.c_int,), ctypes.c_int64
        self._number: int = begin(is_rehearsal)
        self._known = 0
        drop = library.rbln_emulator_drop_recording
        drop.argtypes = (ctypes.c_int64,)
        weakref.finalize(self, drop, self._number)

    def take_new(self) -> tuple[int, int] | None:
        """The calls made since the last look, [first, end); None if there are none to repeat."""
        known, self._known = self._known, int(self._count(self._known))
        return (known, self._known) if self._known > known else None

    @property
    def last_cache_write(self) -> int | None:
        """The last call that writes a KV cache; None without one, or if one is not recorded."""
        call = int(self._last_write(self._number))
        return call if call >= 0 else None

    def replay(self, first: int, end: int, *, only_writes: bool = False) -> None:
        """Make the calls [first, end) again, without the interpreter's lock.

        With ``only_writes`` the last one, of attention, writes its KV cache and computes nothing.

        Raises ``RuntimeError`` as the ops do, say for a block that the cache does not have.
        """
        failure = self._replay(self._number, first, end, only_writes)
        if failure is not None:
            raise RuntimeError(failure.decode())


StartRecording = Callable[..., Recording]
"""Starts a recording on the calling thread; takes ``is_rehearsal``."""

logger = logging.getLogger(__name__)

Mode = Literal["auto", "native", "aten"]

_PRIVATE = "rbln-kernels-"
# Libraries that a wheel of this project brings (deploy/scripts/build_wheel.py).
_PACKAGED = Path(__file__).parent / "prebuilt"


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The active implementation of the kernel ops, and why it is the active one."""

    name: Literal["native", "aten"]
    isa: str  # the name of one of ``LEVELS``, or "aten"
    library: Path | None
    reason: str


class _Active:
    """Kernels that this process has registered with the dispatcher."""

    native: KernelSet | None = None
    handle: ctypes.CDLL | None = None
    fallback: list[torch.library.Library] | None = None


def load_kernels(
    cache_root: Path, mode: Mode, *, bundles: Sequence[Path] = (), report: BuildReport = no_op
) -> KernelSet:
    """Make the kernels of ``mode`` active, building the library first where needed.

    ``bundles`` are other cache roots, which are only read; ``report`` gets the progress of a build.

    "native" raises ``CompileError`` when the library cannot be built or loaded; "auto" falls back
    to PyTorch then; "aten" never builds. Repeated calls are cheap and may change the mode.
    """
    reason = "requested"
    if mode != "aten":
        try:
            if _Active.native is None:
                own, *others = [kernel_store(root) for root in (cache_root, *bundles)]
                _Active.native = _load([own, *private_stores()], [*others, _PACKAGED], report)
            for library in _Active.fallback or ():
                library._destroy()
            _Active.fallback = None
            return _Active.native
        except CompileError as error:
            if mode == "native":
                raise
            logger.warning("running without native kernels: %s", error)
            reason = str(error)
    if _Active.fallback is None:
        _Active.fallback = fallback.register()
    return KernelSet("aten", "aten", None, reason)


def _load(
    own: Sequence[Path], bundles: Sequence[Path] = (), report: BuildReport = no_op
) -> KernelSet:
    """The first of the ``own`` stores that only this user can write takes what has to be built."""
    stores = [*own, *bundles]
    refused, found = why_refused(stores), find_built(stores)
    if refused and found:
        logger.warning("%s", refused)
        found = found[0], f"{found[1]}; {refused}"
    try:
        entry, how = found or _build_into(own, report)
    except OSError as error:
        return _build_for_process(str(error), report)
    try:
        return _open_library(entry, how)
    except (OSError, ArtifactError) as error:
        # Built elsewhere, for another C library, say; the process's own cannot have that fault.
        return _build_for_process(f"the library in {entry} cannot be loaded: {error}", report)


def _build_into(stores: Sequence[Path], report: BuildReport) -> tuple[Path, str]:
    """A library in the first store that will do; raises ``OSError`` when none will."""
    reasons: list[str] = []
    for store in stores:
        try:
            make_trusted_folder(store)
            entry, how = find_or_build(store / build_key(), report=report)
            return entry, "; ".join((how, *reasons))
        except OSError as error:
            reasons.append(str(error))
            logger.warning("kernels are not kept in %s: %s", store, error)
    raise OSError("; ".join(reasons))


def _build_for_process(why: str, report: BuildReport = no_op) -> KernelSet:
    """A private copy serves this process; the loaded library outlives its file."""
    try:
        with claimed_folder(Path(tempfile.gettempdir()), _PRIVATE, f"{_PRIVATE}*/") as private:
            build_library(private, NATIVE, report)
            return _open_library(private, f"built for this process: {why}")
    except (OSError, ArtifactError) as error:
        raise CompileError(f"a kernel library for this process cannot be had: {error}") from error


def kernel_stores(cache_root: str, bundles: Sequence[str]) -> list[Path]:
    """Where a process with these roots looks for libraries, in that order."""
    first, *others = (kernel_store(Path(root)) for root in (cache_root, *bundles))
    return [first, *private_stores(), *others, _PACKAGED]


def find_built(stores: Sequence[Path]) -> tuple[Path, str] | None:
    """The library for this very CPU, else the one for the best level that the CPU reaches."""
    states = {entry: examine(entry)[0] for entry in _entries(NATIVE, stores)}
    for native, state in states.items():
        if state == "whole":
            return native, "loaded from the cache"
    if "damaged" in states.values() and can_build():
        # It was the better one, and is rebuilt.
        return None
    for level in (level for level in LEVELS if level.runs_here()):
        for entry in _entries(level, stores):
            if examine(entry)[0] == "whole":
                return entry, f"built ahead for CPUs with {level.name}"
    return None


def why_refused(stores: Sequence[Path]) -> str:
    """Why a library for this CPU that lies in one of ``stores`` is not run; "" if none lies so."""
    usable = (NATIVE, *(level for level in LEVELS if level.runs_here()))
    for entry in (entry for target in usable for entry in _entries(target, stores)):
        state, why = examine(entry)
        if state == "untrusted":
            return f"the kernels in {entry} are not run: {why}"
    return ""


def _entries(target: Target, stores: Sequence[Path]) -> list[Path]:
    """Where a library for ``target`` would lie in each store; the key reads every source."""
    key = build_key(target)
    return [store / key for store in stores]


def _open_library(entry: Path, reason: str) -> KernelSet:
    """Load the very file that was verified, whatever has come to lie under its name since."""
    # Never closed: the name by which the library is loaded must not come to mean another file.
    descriptor = open_library(entry)
    _Active.handle = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    describe = _Active.handle.rbln_emulator_isa
    describe.restype = ctypes.c_char_p
    return KernelSet("native", describe().decode(), entry / LIBRARY, reason)


def packs_weights() -> bool:
    """Return True if the active kernels need packed weights (``pack_linear_weight``)."""
    return _Active.native is not None and _Active.fallback is None


def active_isa() -> str:
    """Return the name of the instruction set of the active kernels, or "aten"."""
    return _Active.native.isa if _Active.native is not None and packs_weights() else "aten"


def native_library() -> ctypes.CDLL | None:
    """The loaded library while the native kernels are the active ones."""
    return _Active.handle if packs_weights() else None


def coded(packed: Tensor, out_features: int) -> Tensor:
    """A packed [out_features, K] weight, coded in its own memory if the kernels can read that.

    Codes have 12 bits for a bfloat16 (kernels/linear/coded.h). They are uint8 [N/16, K/2, 16, 4],
    whose last quarter has what is not in a code. ``packed`` must not be read again.
    """
    library = native_library()
    if library is None or packed.dtype != torch.bfloat16 or packed.is_meta:
        return packed
    depth = ctypes.c_int64(2 * packed.shape[1])
    address = ctypes.c_void_p(packed.data_ptr())
    is_coded = library.rbln_emulator_code_weight(address, ctypes.c_int64(out_features), depth)
    return packed.view(torch.uint8) if is_coded else packed


def set_threads(threads: int) -> None:
    """Set the thread count of the active kernels, the caller's included; results do not change.

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
