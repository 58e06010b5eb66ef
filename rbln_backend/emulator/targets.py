"""Build targets of kernel libraries: this CPU, or all CPUs of a level."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_AVX2 = frozenset("avx2 fma f16c bmi1 bmi2 movbe abm".split())
_AVX512 = _AVX2 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
# Zen 4 and Sapphire Rapids, and what came after them. Cooper Lake, without VBMI, runs as "avx512".
_BF16 = _AVX512 | frozenset("avx512_bf16 avx512_vnni avx512vbmi".split())
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi")
_AMX = frozenset(("amx_tile", "amx_bf16", "amx_int8"))

# Linux's arch_prctl on x86-64, its request for a part of a thread's state, and the part (its
# Documentation/arch/x86/xstate.rst).
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


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
        has_all = platform.machine() == self.machine and self.features <= cpu_features()
        return has_all and not (self.features >= _AMX and why_no_tiles())

    def compiler_flags(self) -> tuple[str, ...]:
        """The flags, those of ``NATIVE`` as this process may use what the CPU has."""
        if self is NATIVE and LEVELS[0].runs_here():
            return (*self.flags, _TILES)
        return self.flags


# The kernels' own word: whether tiles may be used is for the process to ask, not for the compiler.
_TILES = "-DRBLN_AMX"
NATIVE = Target("native", ("-march=native",))
# The best first. Names are those by which a library calls its own instruction set.
LEVELS = (
    Target("amx_bf16", (*_BF16_FLAGS, _TILES), _BF16 | _AMX),
    Target("avx512_bf16", _BF16_FLAGS, _BF16),
    Target("avx512", ("-march=x86-64-v4",), _AVX512),
    Target("avx2", ("-march=x86-64-v3",), _AVX2),
    Target("neon", ("-march=armv8-a",), frozenset(("asimd",)), "aarch64"),
    Target("portable", ("-march=x86-64",)),
)


def buildable_levels() -> tuple[Target, ...]:
    """Return the levels of this machine's architecture, the best first."""
    return tuple(level for level in LEVELS if level.machine == platform.machine())


def has_tiles() -> bool:
    """Return True if the CPU has AMX tiles with bfloat16 and int8 products."""
    return cpu_features() >= _AMX


@cache
def why_no_tiles() -> str:
    """Why this process may not use the tiles of AMX; "" where it may.

    Linux (5.16 and later) grants them to a whole process that asks, and to its children by fork,
    not past an exec. It refuses where a thread has an alternative signal stack that is too small
    for them, so that asking comes before threads are started.
    """
    if not has_tiles():
        return "the CPU has no tiles"
    words = (ctypes.c_long(word) for word in (_REQUEST_PERMISSION, _TILE_DATA))
    if ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(_ARCH_PRCTL), *words) == 0:
        return ""
    code = ctypes.get_errno()
    return f"Linux refuses the tiles of AMX: {errno.errorcode.get(code, code)}, {os.strerror(code)}"


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
