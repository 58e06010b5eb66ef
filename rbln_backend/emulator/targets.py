"""Build targets of kernel libraries: this CPU, or all CPUs of a level."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
