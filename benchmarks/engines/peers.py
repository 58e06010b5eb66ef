"""Environment of the compared engines that are not dependencies: ``python -m benchmarks peers``.

A virtual environment under the user's cache, from requirements/bench-peers.txt, with llama.cpp
compiled for this processor (5 to 15 minutes, once). Invariant: the environment that holds the stamp
of the requirements is complete.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.models.shapes import CACHE_ROOT

_HERE = Path(__file__).parents[1]
_REQUIREMENTS = _HERE.parent / "requirements" / "bench-peers.txt"
_FOLDER = CACHE_ROOT / "peers"
PYTHON = _FOLDER / "bin" / "python"
# For this processor, as our kernels and torch's are.
_CMAKE_ARGS = "-DGGML_NATIVE=ON"


def peers_python() -> Path:
    """Return the environment's interpreter, after building the environment if need be.

    Raises subprocess.CalledProcessError if pip or the compiler fails.
    """
    stamp = _FOLDER / "requirements.sha256"
    wanted = hashlib.sha256(_REQUIREMENTS.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="ascii") == wanted:
        return PYTHON
    shutil.rmtree(_FOLDER, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(_FOLDER)], check=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    # Only the build of llama.cpp reads this variable, so only that process gets it.
    build = ["env", f"CMAKE_ARGS={_CMAKE_ARGS}", *pip, "--no-binary", "llama-cpp-python"]
    subprocess.run([*build, "-r", str(_REQUIREMENTS)], check=True)
    stamp.write_text(wanted, encoding="ascii")
    return PYTHON


def gguf_of(text_model: Path) -> Path:
    """Return the GGUF form of a checkpoint with a tokenizer, written beside it on first use.

    Its name has the hash of the code that writes it. Needs the peers' environment.
    """
    digest = hashlib.sha256((_HERE / "models" / "gguf_model.py").read_bytes()).hexdigest()[:8]
    place = text_model.with_name(f"{text_model.name}-{digest}.gguf")
    if not place.exists():
        building = place.with_suffix(".building")
        command = [
            str(PYTHON),
            "-m",
            "benchmarks.models.gguf_model",
            str(text_model),
            str(building),
        ]
        subprocess.run(command, check=True, cwd=_HERE.parent)
        building.rename(place)
    return place


def peer_versions() -> dict[str, str]:
    """Return the versions of the peers that requirements/bench-peers.txt pins."""
    lines = _REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    return {name: pins[name] for name in ("llama-cpp-python", "gguf")}


def main(argv: Sequence[str] | None = None) -> int:
    """Build the environment."""
    argparse.ArgumentParser(description="Build the environment of the peers.").parse_args(argv)
    print(peers_python())
    return 0
