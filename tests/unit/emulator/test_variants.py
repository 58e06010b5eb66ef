"""The kernels for CPUs that are not here: AVX-512 by a stand-in of its intrinsics, and portable.

Each runs the numeric tests of the others in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel_cache import VARIANTS

HERE = Path(__file__).parent
NUMERICS = (
    "test_linear",
    "test_attention",
    "test_e4m3_cache",
    "test_window_attention",
    "test_self_attention",
    "test_small_ops",
    "test_sampling",
    "test_penalties",
    "test_moe",
    "test_quantized",
)


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", VARIANTS)
def test_numerics(variant: str) -> None:
    files = [str(HERE / f"{name}.py") for name in NUMERICS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"--kernel-variant={variant}", *files],
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
