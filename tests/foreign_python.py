"""Pythons with other packages than ours, made at their first use and kept."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def kept_python(place: Path, fill: Callable[[Path], None]) -> Path:
    """Return the interpreter of the environment ``place``, which ``fill`` is given to build.

    It appears whole: what is half built has another name.
    """
    if not place.exists():
        building = place.with_name(f"{place.name}.{os.getpid()}")
        shutil.rmtree(building, ignore_errors=True)
        run([sys.executable, "-m", "venv", "--without-pip", str(building)])
        fill(building)
        building.rename(place)
    return place / "bin" / "python"


def install(place: Path, *wheels: str) -> None:
    """Put wheels, or with ``-r`` a file's, into an environment; needs the package registry."""
    command = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install"]
    run([*command, "--quiet", "--no-deps", "--only-binary", ":all:", *wheels])


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[:6]}: {done.stderr[-3000:]}"
