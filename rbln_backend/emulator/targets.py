"""What a kernel library can be built for: the CPU that builds it, or all that reach a level."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_AVX2 = frozenset("avx2 fma f16c bmi1 bmi2 movbe abm".split())
_AVX512 = _AVX2 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())


@dataclass(frozen=True, slots=True)
class Target:
    """Compiler flags, and the CPU features (names of /proc/cpuinfo) that their code needs."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str] = frozenset()

    def runs_here(self) -> bool:
        """Whether this host's CPU has all that the library needs."""
        return platform.machine() == "x86_64" and self.features <= cpu_features()


NATIVE = Target("native", ("-march=native",))
# The best first. Names are those by which a library calls its own instruction set.
LEVELS = (
    Target("avx512_bf16", ("-march=x86-64-v4", "-mavx512bf16"), _AVX512 | {"avx512_bf16"}),
    Target("avx512", ("-march=x86-64-v4",), _AVX512),
    Target("avx2", ("-march=x86-64-v3",), _AVX2),
    Target("portable", ("-march=x86-64",)),
)


@cache
def cpu_lines() -> tuple[str, ...]:
    """What the kernel says of the first CPU's model and features; empty where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return ()
    wanted = ("model name", "flags", "Features", "CPU part")
    return tuple(line for line in lines if line.startswith(wanted))


@cache
def cpu_features() -> frozenset[str]:
    """The names that /proc/cpuinfo lists."""
    lists = (line.partition(":")[2] for line in cpu_lines() if line.startswith("flags"))
    return frozenset(word for words in lists for word in words.split())


def cpu_name() -> str:
    """What the CPU calls itself, else its architecture."""
    named = (line.partition(":")[2].strip() for line in cpu_lines() if line.startswith("model"))
    return next(named, platform.machine())
