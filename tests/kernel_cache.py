"""One build of the emulator's kernels for all cache roots that tests make.

``python -m tests.kernel_cache`` builds those of this CPU before a run.
"""

import hashlib
from pathlib import Path

from rbln_backend.devices.emulated.build import LEVELS, NATIVE, Target, build_key, find_or_build

_STAND_IN = Path(__file__).parent / "unit" / "emulator" / "avx512_stand_in.h"


def strict(target: Target) -> Target:
    """The same, where a warning is an error."""
    return Target(target.name, (*target.flags, "-Werror"), target.features)


# AVX-512 on any CPU with AVX2: the branches are those of the real thing, the speed is not. More
# than -O1 would take the compiler minutes.
_AVX512 = ("-march=x86-64-v3", "-O1", "-include", str(_STAND_IN))
VARIANTS = {
    "avx512_bf16": strict(Target("avx512_bf16", (*_AVX512, "-DSTAND_IN_BF16"))),
    "avx512": strict(Target("avx512", _AVX512)),
    "portable": strict(LEVELS[-1]),
}

SHARED = Path.home() / ".cache" / "rbln-serve" / "test-kernels"


def share_kernels(cache_root: Path) -> Path:
    """Let ``cache_root`` find the shared kernels instead of building its own; returns it."""
    SHARED.mkdir(parents=True, exist_ok=True)
    link = cache_root / "rbln" / "kernels"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(SHARED, target_is_directory=True)
    return cache_root


def build_variant(name: str) -> Path:
    """The entry of one of ``VARIANTS``, built when it or the stand-in has changed."""
    target = VARIANTS[name]
    key = build_key(target) + hashlib.sha256(_STAND_IN.read_bytes()).hexdigest()[:8]
    SHARED.mkdir(parents=True, exist_ok=True)
    return find_or_build(SHARED / key, target)[0]


if __name__ == "__main__":
    SHARED.mkdir(parents=True, exist_ok=True)
    find_or_build(SHARED / build_key(NATIVE), NATIVE)
