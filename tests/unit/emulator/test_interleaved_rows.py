"""Rows as tiles read them: every word in its place, and nothing read or written beyond."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rbln_backend.devices.emulated.build import _FLAGS, _SOURCE_DIR, LEVELS, Target

SOURCE = Path(__file__).parent / "interleaved_rows.cpp"
# The vectors of the level of bf16 products are those of AVX-512.
WIDTHS = [level for level in LEVELS if level.name in ("avx512", "avx2", "portable")]


@pytest.fixture(autouse=True)
def native_kernels() -> None:
    """Nothing of the library is needed."""


@pytest.mark.parametrize("level", WIDTHS, ids=lambda level: level.name)
def test_every_word_is_in_its_place(level: Target, tmp_path: Path) -> None:
    if not level.runs_here():
        pytest.skip(f"this CPU has no {level.name}")
    program = tmp_path / "interleaved_rows"
    command = ["g++", *_FLAGS, *level.flags, "-O1", "-fsanitize=address", "-Werror"]
    command += ["-iquote", str(_SOURCE_DIR), str(SOURCE), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
